// Runs kernels of a library on an Ascend 950 and compares what they leave with recorded bytes:
//   driver KERNELS.so FOLDER
// FOLDER/cases.txt names a case in each line: kernel, number of extents, extents, number of tensors,
// then for each tensor its bytes and what to compare: - (nothing), bytes, f32 or bf16. Case i has
// FOLDER/i.N.in for each tensor, and FOLDER/i.N.want where something is compared.
// Uses AscendCL by its documented calls. Never compiled against CANN or run by its authors.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "acl/acl.h"

typedef int32_t (*Kernel)(void* const* tensors, const int64_t* extents, aclrtStream stream);
typedef std::vector<char> Bytes;

static bool worked(int code, const char* what) {
  if (code != 0) fprintf(stderr, "%s: error %d\n", what, code);
  return code == 0;
}
#define CHECK(call) \
  if (!worked((int)(call), #call)) return false

struct Operand {
  std::string kind;
  Bytes given, want;
  void* device = nullptr;
};

struct Case {
  std::string kernel;
  std::vector<int64_t> extents;
  std::vector<Operand> operands;
};

static bool read_bytes(const std::string& path, size_t size, Bytes& out) {
  std::ifstream file(path, std::ios::binary);
  out.assign(std::istreambuf_iterator<char>(file), {});
  if (out.size() == size) return true;
  fprintf(stderr, "file '%s': got %zu bytes, want %zu\n", path.c_str(), out.size(), size);
  return false;
}

static bool read_case(const std::string& folder, int number, const std::string& line, Case& out) {
  std::istringstream words(line);
  size_t extents = 0, operands = 0, size = 0;
  words >> out.kernel >> extents;
  out.extents.resize(extents);
  for (int64_t& extent : out.extents) words >> extent;
  words >> operands;
  out.operands.resize(operands);
  for (size_t i = 0; i < operands; ++i) {
    Operand& operand = out.operands[i];
    words >> size >> operand.kind;
    std::string stem = folder + "/" + std::to_string(number) + "." + std::to_string(i);
    if (!read_bytes(stem + ".in", size, operand.given)) return false;
    if (operand.kind != "-" && !read_bytes(stem + ".want", size, operand.want)) return false;
  }
  return bool(words);
}

static float value_at(const Bytes& bytes, size_t i, bool wide) {
  float value = 0;
  if (wide) memcpy(&value, &bytes[i * 4], 4);
  else memcpy((char*)&value + 2, &bytes[i * 2], 2);
  return value;
}

// The largest difference over the largest value; for bytes, the part of them that differs.
static double distance(const Operand& operand, const Bytes& got) {
  if (operand.kind == "bytes") {
    size_t others = 0;
    for (size_t i = 0; i < got.size(); ++i) others += got[i] != operand.want[i];
    return got.empty() ? 0 : (double)others / (double)got.size();
  }
  bool wide = operand.kind == "f32";
  double largest = 0, apart = 0;
  for (size_t i = 0; i < got.size() / (wide ? 4 : 2); ++i) {
    double a = value_at(got, i, wide), b = value_at(operand.want, i, wide);
    if (a != a && b != b) continue;
    if (!isfinite(a) || !isfinite(b)) {
      if (a != b) return INFINITY;
      continue;
    }
    largest = fmax(largest, fabs(b)), apart = fmax(apart, fabs(a - b));
  }
  return apart / fmax(largest, 1e-30);
}

static bool run(const Case& c, Kernel kernel, aclrtStream stream, std::vector<Bytes>& got) {
  std::vector<void*> tensors;
  for (const Operand& operand : c.operands) {
    void* device = nullptr;
    size_t size = operand.given.size();
    CHECK(aclrtMalloc(&device, size ? size : 64, ACL_MEM_MALLOC_HUGE_FIRST));
    tensors.push_back(device);
    if (size) CHECK(aclrtMemcpy(device, size, operand.given.data(), size, ACL_MEMCPY_HOST_TO_DEVICE));
  }
  CHECK(kernel(tensors.data(), c.extents.data(), stream));
  CHECK(aclrtSynchronizeStream(stream));
  for (size_t i = 0; i < tensors.size(); ++i) {
    got.emplace_back(c.operands[i].kind == "-" ? 0 : c.operands[i].given.size());
    Bytes& bytes = got.back();
    if (!bytes.empty())
      CHECK(aclrtMemcpy(bytes.data(), bytes.size(), tensors[i], bytes.size(), ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(aclrtFree(tensors[i]));
  }
  return true;
}

// Returns false at the first call that failed; `far` counts kernels whose results differ.
static bool run_all(void* library, const std::string& folder, int& far) {
  aclrtStream stream = nullptr;
  CHECK(aclInit(nullptr));
  CHECK(aclrtSetDevice(0));
  CHECK(aclrtCreateStream(&stream));
  std::ifstream list(folder + "/cases.txt");
  std::string line;
  for (int number = 0; std::getline(list, line); ++number) {
    Case c;
    if (!read_case(folder, number, line, c)) return false;
    Kernel kernel = (Kernel)dlsym(library, ("tw_chip_" + c.kernel).c_str());
    if (!kernel) {
      fprintf(stderr, "kernel '%s': is not in the library\n", c.kernel.c_str());
      return false;
    }
    std::vector<Bytes> got;
    if (!run(c, kernel, stream, got)) return false;
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i)
      if (c.operands[i].kind != "-") worst = fmax(worst, distance(c.operands[i], got[i]));
    printf("%s %s %.2e\n", worst <= 0.02 ? "near" : "FAR", c.kernel.c_str(), worst);
    far += worst > 0.02;
  }
  CHECK(aclrtDestroyStream(stream));
  CHECK(aclrtResetDevice(0));
  CHECK(aclFinalize());
  return true;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: driver KERNELS.so FOLDER\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  int far = 0;
  return !run_all(library, argv[2], far) ? 2 : far > 0;
}
