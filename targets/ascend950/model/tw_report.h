// What a launch did wrong, as sentences; equal ones are kept once.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include <string.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tw {
struct Where {  // an instruction as a report names it
  const char* name;
  const char* file;
  int line, actor;
};

// Of equal faults (same kind, same instructions) one place stands for all: the smallest sentence, so
// that the order in which blocks ran does not show.
class Reports {
 public:
  bool empty() const { return found_.empty(); }
  void add(const std::string& key, const std::string& text) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto [at, fresh] = found_.try_emplace(key, text);
    if (!fresh && before(text, at->second)) at->second = text;
  }
  std::vector<std::string> sorted() const {
    std::vector<std::string> all;
    for (const auto& entry : found_) all.push_back(entry.second);
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return rank(a) != rank(b) ? rank(a) < rank(b) : a < b;
    });
    return all;
  }

 private:
  static bool before(const std::string& a, const std::string& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  }
  // What causes other faults comes first.
  static int rank(const std::string& text) {
    static const char* kinds[] = {"illegal path", "field out of range", "misaligned", "overflow",
                                  "out of bounds", "pairing", "race", "deadlock"};
    for (int i = 0; i < 8; ++i)
      if (text.compare(0, strlen(kinds[i]), kinds[i]) == 0) return i;
    return 8;
  }
  std::mutex mutex_;
  std::map<std::string, std::string> found_;
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
