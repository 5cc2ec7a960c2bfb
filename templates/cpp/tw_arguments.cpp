// Checks of a kernel's arguments, and the error of one sentence that a failed one raises.
#include "tw_arguments.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace {

struct Flaw {
  const char* what;  // null: none
  char got[32], want[32];
};

void name_type(char* text, int code, int bits, int lanes) {
  const char* prefix = code == kDLInt      ? "i"
                       : code == kDLUInt   ? "u"
                       : code == kDLFloat  ? "f"
                       : code == kDLBfloat ? "bf"
                                           : "other";
  snprintf(text, 32, lanes == 1 ? "%s%d" : "%s%dx%d", prefix, bits, lanes);
}

bool differs(Flaw* flaw, const char* what, int64_t got, int64_t want) {
  if (got == want) return false;
  flaw->what = what;
  snprintf(flaw->got, 32, "%lld", (long long)got);
  snprintf(flaw->want, 32, "%lld", (long long)want);
  return true;
}

void find_flaw(const DLTensor* t, int code, int bits, int ndim, Flaw* flaw) {
  if (t->dtype.code != code || t->dtype.bits != bits || t->dtype.lanes != 1) {
    flaw->what = "element type";
    name_type(flaw->got, t->dtype.code, t->dtype.bits, t->dtype.lanes);
    name_type(flaw->want, code, bits, 1);
    return;
  }
  if (differs(flaw, "number of axes", t->ndim, ndim)) return;
  if (differs(flaw, "device type", t->device.device_type, tw_device_type)) return;
  int64_t count = 1;
  for (int axis = ndim - 1; axis >= 0; --axis) {
    bool strided = t->strides != nullptr && t->shape[axis] > 1;
    if (strided && differs(flaw, "stride", t->strides[axis], count)) return;
    count *= t->shape[axis];
  }
  if (count == 0) return;
  if (differs(flaw, "byte offset", int64_t(t->byte_offset), 0)) return;
  if (differs(flaw, "data address modulo 64", int64_t(uintptr_t(t->data) % 64), 0)) return;
  differs(flaw, "data is not null", t->data != nullptr, 1);
}

}  // namespace

int tw_raise(const char* text) {
  // By hand: TVMFFIErrorSetRaisedFromCStr also walks the stack, which takes seconds under torch.
  TVMFFIByteArray kind = {"ValueError", 10}, message = {text, strlen(text)}, backtrace = {"", 0};
  TVMFFIObjectHandle error = nullptr;
  if (TVMFFIErrorCreate(&kind, &message, &backtrace, &error) != 0) return -1;
  TVMFFIErrorSetRaised(error);
  TVMFFIObjectDecRef(error);
  return -1;
}

int tw_fail(const char* kernel, const char* format, ...) {
  char text[448];
  int used = snprintf(text, 128, "kernel '%s': ", kernel);
  va_list values;
  va_start(values, format);
  vsnprintf(text + (used < 127 ? used : 127), 320, format, values);
  va_end(values);
  return tw_raise(text);
}

bool tw_check_count(const char* kernel, int32_t got, int32_t want) {
  if (got != want) tw_fail(kernel, "number of arguments: got %d, want %d", got, want);
  return got == want;
}

const DLTensor* tw_check_tensor(const char* kernel, const TVMFFIAny* args, int index,
                                const char* name, int code, int bits, int ndim) {
  const TVMFFIAny& arg = args[index];
  const DLTensor* tensor = nullptr;
  if (arg.type_index == kTVMFFIDLTensorPtr) tensor = static_cast<const DLTensor*>(arg.v_ptr);
  if (arg.type_index == kTVMFFITensor) {  // an object: its DLTensor follows the header
    tensor = reinterpret_cast<const DLTensor*>(reinterpret_cast<char*>(arg.v_obj) +
                                               sizeof(TVMFFIObject));
  }
  if (tensor == nullptr) {
    tw_fail(kernel, "argument %d '%s': got type index %d, want a tensor", index, name,
            arg.type_index);
    return nullptr;
  }
  Flaw flaw = {};
  find_flaw(tensor, code, bits, ndim, &flaw);
  if (flaw.what == nullptr) return tensor;
  tw_fail(kernel, "argument %d '%s': %s: got %s, want %s", index, name, flaw.what, flaw.got,
          flaw.want);
  return nullptr;
}

bool tw_check_extent(const char* kernel, const DLTensor* tensor, const char* name, int axis,
                     int64_t want) {
  int64_t got = axis < tensor->ndim ? tensor->shape[axis] : -1;
  if (got == want) return true;
  tw_fail(kernel, "tensor '%s': extent of axis %d: got %lld, want %lld", name, axis, (long long)got,
          (long long)want);
  return false;
}

bool tw_check_least(const char* kernel, const DLTensor* tensor, const char* name, int64_t want) {
  if (tensor->shape[0] >= want) return true;
  tw_fail(kernel, "tensor '%s': got %lld bytes, want at least %lld", name,
          (long long)tensor->shape[0], (long long)want);
  return false;
}

bool tw_check_device(const char* kernel, const DLTensor* tensor, const char* name,
                     const DLTensor* other) {
  if (tensor->device.device_id == other->device.device_id) return true;
  tw_fail(kernel, "tensor '%s': device: got %d, want %d", name, tensor->device.device_id,
          other->device.device_id);
  return false;
}

bool tw_check_int(const char* kernel, const TVMFFIAny* args, int index, const char* name,
                  int64_t lower, int64_t upper, int64_t* value) {
  const TVMFFIAny& arg = args[index];
  if (arg.type_index != kTVMFFIInt) {
    tw_fail(kernel, "argument %d '%s': got type index %d, want an int", index, name,
            arg.type_index);
    return false;
  }
  *value = arg.v_int64;
  if (*value >= lower && *value <= upper) return true;
  tw_fail(kernel, "argument %d '%s': got %lld, want %lld to %lld", index, name, (long long)*value,
          (long long)lower, (long long)upper);
  return false;
}
