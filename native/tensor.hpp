// Borrows the memory of a torch tensor, without a copy and without building against torch.
//
// Torch publishes a table of C functions on its tensor type (DLPack's exchange API). If a torch version does not have
// it, this file reads the Python attributes of the tensor.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace megalith {

namespace nb = nanobind;

namespace dlpack {

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
// What a capsule named "dltensor" holds; the consumer calls the deleter when it does not need the memory any more.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};
struct Header {
  Version version;
  Header* previous;
};
// Only the fields that this file uses have types; the order is DLPack's.
struct ExchangeApi {
  Header header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, Tensor* out);
  void* current_work_stream;
};

constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2;

}  // namespace dlpack

enum class Kind { uint8, int32, int64, float32, float64, any };

// Which memory layouts a call accepts: contiguous, or a matrix with contiguous rows at any distance.
enum class Strides { contiguous, rows };

// A CPU tensor, borrowed for the duration of a call.
struct TensorView {
  void* data = nullptr;
  int ndim = 0;
  int64_t shape[4] = {};
  int64_t item_bytes = 0;
  int64_t row_stride = 0;  // of a matrix: elements from one row to the next

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    return n;
  }
};

inline bool& exchange_api_enabled() {
  static bool on = true;
  return on;
}

inline const dlpack::ExchangeApi* exchange_api(PyObject* object) {
  struct Known {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  static Known known[4] = {};  // Tensor, Parameter and other subclasses; types are never freed
  static int next = 0;
  PyTypeObject* type = Py_TYPE(object);
  for (const Known& k : known)
    if (k.type == type) return k.api;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule) {
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  while (api && api->header.version.major != 1)
    api = reinterpret_cast<const dlpack::ExchangeApi*>(api->header.previous);
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known[next] = {type, api};
  next = (next + 1) % 4;
  return api;
}

struct KindFacts {
  const char* name;
  uint8_t code, bits;
};

inline KindFacts facts(Kind kind) {
  switch (kind) {
    case Kind::uint8: return {"uint8", dlpack::kUInt, 8};
    case Kind::int32: return {"int32", dlpack::kInt, 32};
    case Kind::int64: return {"int64", dlpack::kInt, 64};
    case Kind::float32: return {"float32", dlpack::kFloat, 32};
    case Kind::float64: return {"float64", dlpack::kFloat, 64};
    default: return {"", 0, 0};
  }
}

template <class T>
constexpr Kind kind_of();
template <>
constexpr Kind kind_of<float>() { return Kind::float32; }
template <>
constexpr Kind kind_of<double>() { return Kind::float64; }

[[noreturn]] inline void reject(const char* name, Kind kind) {
  const char* type = facts(kind).name;
  throw nb::type_error(
      (std::string(name) + ": expected a contiguous " + type + (*type ? " " : "") + "tensor on the CPU")
          .c_str());
}

inline nb::str text_of(nb::object object) {
  PyObject* text = PyObject_Str(object.ptr());
  if (!text) throw nb::python_error();
  return nb::steal<nb::str>(text);
}

// Whether the strides are accepted; sets the row stride of a matrix. They are in elements; null: contiguous.
inline bool accept_strides(TensorView& view, const int64_t* strides, Strides accepted) {
  if (view.ndim == 2) view.row_stride = view.shape[1];
  if (!strides || view.numel() == 0) return true;
  if (accepted == Strides::rows && view.ndim == 2) {
    if (view.shape[0] > 1) view.row_stride = strides[0];
    return (view.shape[1] == 1 || strides[1] == 1) && view.row_stride >= 0;
  }
  int64_t expected = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    if (view.shape[d] > 1 && strides[d] != expected) return false;
    expected *= view.shape[d];
  }
  return true;
}

inline TensorView borrow_by_attributes(nb::handle object, Kind kind, const char* name, Strides accepted) {
  if (!nb::hasattr(object, "data_ptr")) reject(name, kind);
  const nb::str dtype = text_of(object.attr("dtype")), device = text_of(object.attr("device"));
  const std::string wanted = std::string("torch.") + facts(kind).name;
  if ((kind != Kind::any && wanted != dtype.c_str()) || std::strncmp(device.c_str(), "cpu", 3) != 0)
    reject(name, kind);
  TensorView view;
  for (nb::handle size : object.attr("shape")) {
    if (view.ndim == 4) reject(name, kind);
    view.shape[view.ndim++] = nb::cast<int64_t>(size);
  }
  int64_t strides[4] = {};
  int dims = 0;
  for (nb::handle stride : object.attr("stride")()) strides[dims++] = nb::cast<int64_t>(stride);
  if (!accept_strides(view, strides, accepted)) reject(name, kind);
  view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
  view.item_bytes = nb::cast<int64_t>(object.attr("element_size")());
  if (!view.data && view.numel() > 0) reject(name, kind);
  return view;
}

inline TensorView borrow(nb::handle object, Kind kind, const char* name, Strides accepted = Strides::contiguous) {
  const dlpack::ExchangeApi* api =
      exchange_api_enabled() ? exchange_api(object.ptr()) : nullptr;
  if (!api) return borrow_by_attributes(object, kind, name, accepted);
  dlpack::Tensor t;
  if (api->dltensor_from_py_object_no_sync(object.ptr(), &t) != 0) {
    PyErr_Clear();
    reject(name, kind);
  }
  const KindFacts wanted = facts(kind);
  const bool fits = kind == Kind::any || (t.dtype.code == wanted.code && t.dtype.bits == wanted.bits);
  if (t.device.type != dlpack::kCpu || !fits || t.dtype.lanes != 1 || t.ndim > 4) reject(name, kind);
  TensorView view;
  view.item_bytes = t.dtype.bits / 8;
  view.ndim = t.ndim;
  for (int d = 0; d < t.ndim; ++d) view.shape[d] = t.shape[d];
  if (!accept_strides(view, t.strides, accepted)) reject(name, kind);
  if (!t.data && view.numel() > 0) reject(name, kind);  // a tensor without memory, for example in tracing
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  return view;
}

}  // namespace megalith
