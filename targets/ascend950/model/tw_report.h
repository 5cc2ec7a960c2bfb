// What a launch did wrong, as sentences; equal ones are kept once.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include <mutex>
#include <string>
#include <vector>

namespace tw {
struct Where {  // an instruction as a report names it
  const char* name;
  const char* file;
  int line, actor;
};

class Reports {
 public:
  void clear() { found_.clear(), total_ = 0; }
  bool empty() const { return found_.empty(); }
  void add(const std::string& text) {
    std::lock_guard<std::mutex> hold(mutex_);
    ++total_;
    if (found_.size() >= 20) return;
    for (const auto& known : found_)
      if (known == text) return;
    found_.push_back(text);
  }
  // Reports of all blocks in one order: blocks run in parallel.
  std::vector<std::string> sorted() const;
  int total() const { return total_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> found_;
  int total_ = 0;
};

inline std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string text(const char* format, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

inline const char* base_name(const char* path) {
  const char* found = path;
  for (const char* p = path; *p; ++p)
    if (*p == '/') found = p + 1;
  return found;
}
}  // namespace tw
