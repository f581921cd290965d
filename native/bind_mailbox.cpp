// The Python side of exchanges between ranks: messages, their memory, and shared memory on one host.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bind.hpp"
#include "buffers.hpp"
#include "moves.hpp"
#if defined(__linux__)
#include "mailbox.hpp"
#endif

namespace megalith {

namespace {

// A pool whose buffers Python takes as DLPack capsules: the memory returns to the pool, without Python's lock, when the
// last tensor that uses it is freed.
struct Buffers {
  explicit Buffers(bool huge_pages) : pool(std::make_shared<BufferPool>(huge_pages)) {}

  struct Lent {
    dlpack::ManagedTensor managed;
    int64_t size;
    std::unique_ptr<BufferPool::Buffer> buffer;
  };

  nb::object get(int64_t bytes) {
    require(bytes > 0 && bytes < int64_t{1} << 46, "bytes: out of range");
    std::unique_ptr<Lent> lent(new Lent{});
    lent->size = bytes;
    lent->buffer = pool->get(static_cast<size_t>(bytes));
    lent->managed.tensor = {lent->buffer->data(), {dlpack::kCpu, 0}, 1, {dlpack::kUInt, 8, 1}, &lent->size, nullptr, 0};
    lent->managed.context = lent.get();
    lent->managed.deleter = [](dlpack::ManagedTensor* self) { delete static_cast<Lent*>(self->context); };
    PyObject* capsule = PyCapsule_New(&lent->managed, "dltensor", [](PyObject* unused) {
      if (!PyCapsule_IsValid(unused, "dltensor")) return;  // a tensor has it
      auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
      managed->deleter(managed);
    });
    if (!capsule) throw nb::python_error();
    lent.release();
    return nb::steal(capsule);
  }

  std::shared_ptr<BufferPool> pool;
};

// Checks the sizes of join_blocks, then copies.
void join(handle data, const std::vector<int64_t>& begins, handle counts, handle widths, handle out) {
  const TensorView from = borrow(data, Kind::uint8, "data"), to = borrow(out, Kind::uint8, "out");
  const TensorView c = borrow(counts, Kind::int64, "counts"), w = borrow(widths, Kind::int64, "widths");
  require(c.ndim == 2 && w.ndim == 1 && w.shape[0] == c.shape[1], "counts: expected [peers, tables], one width each");
  require(begins.size() == static_cast<size_t>(c.shape[0]), "begins: expected one per peer");
  const int64_t peers = c.shape[0], tables = c.shape[1], limit = from.numel();
  int64_t left = to.numel();
  for (int64_t p = 0; p < peers; ++p) {
    int64_t at = begins[static_cast<size_t>(p)];
    require(at >= 0 && at <= limit, "begins: outside the data");
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t count = c.as<int64_t>()[p * tables + t], width = w.as<int64_t>()[t];
      require(count >= 0 && width >= 1 && count <= (limit - at) / width, "counts: blocks outside the data");
      at += count * width;
      left -= count * width;
      require(left >= 0, "out: too small");
    }
  }
  require(left == 0, "out: too large");
  nb::gil_scoped_release release;
  join_blocks(from.as<char>(), begins.data(), c.as<int64_t>(), w.as<int64_t>(), peers, tables, to.as<char>());
}

// A numpy array of uint8 in the memory of an object, which it keeps alive.
nb::object array_in(void* data, Py_ssize_t bytes, handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {static_cast<size_t>(bytes)}, owner));
}

// Bytes to be filled before anything else sees them, and an array of their memory.
nb::tuple new_bytes(int64_t size) {
  require(size > 0 && size < int64_t{1} << 46, "size: out of range");
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (!made) throw nb::python_error();
  const nb::object bytes = nb::steal(made);
  return nb::make_tuple(bytes, array_in(PyBytes_AsString(made), static_cast<Py_ssize_t>(size), bytes));
}

// An array of the memory of a memoryview, which must not be written.
nb::object view_array(handle view) {
  require(PyMemoryView_Check(view.ptr()), "view: expected a memoryview");
  Py_buffer buffer;
  if (PyObject_GetBuffer(view.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const nb::object array = array_in(buffer.buf, buffer.len, view);
  PyBuffer_Release(&buffer);
  return array;
}

// Lets the C library keep freed memory for the next message instead of returning it to the operating system, from
// which it would come back page by page.
void keep_freed_memory(int bytes) {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value; below it, memory comes from the heaps
  mallopt(M_TRIM_THRESHOLD, bytes);
#else
  (void)bytes;
#endif
}

void bind_messages(nb::module_& m) {
  m.def("keep_freed_memory", keep_freed_memory, nb::arg("bytes"));
  m.def("new_bytes", new_bytes, nb::arg("size"));
  m.def("view_array", view_array, nb::arg("view"));
  nb::class_<Buffers>(m, "Buffers")
      .def(nb::init<bool>(), nb::arg("huge_pages") = true)
      .def("get", &Buffers::get, nb::arg("bytes"))
      .def_prop_ro("num_free", [](const Buffers& b) { return b.pool->num_free(); });
  m.def("join_blocks", join, nb::arg("data"), nb::arg("begins"), nb::arg("counts"), nb::arg("widths"), nb::arg("out"));
}

}  // namespace

#if defined(__linux__)

namespace {

struct Bytes {
  char* data;
  size_t n;
};

// A tensor that holds exactly the parts of these sizes.
Bytes borrow_parts(handle tensor, const std::vector<int64_t>& sizes, const char* name) {
  const TensorView v = borrow(tensor, Kind::uint8, name);
  uint64_t left = static_cast<uint64_t>(v.numel());
  bool fits = true;
  for (int64_t bytes : sizes) {
    fits &= bytes >= 0 && static_cast<uint64_t>(bytes) <= left;
    if (fits) left -= static_cast<uint64_t>(bytes);
  }
  if (!fits || left > 0)
    throw std::invalid_argument(std::string(name) + "_sizes: must be at least 0 and add up to the " +
                                std::to_string(v.numel()) + " bytes of " + name);
  return {v.as<char>(), static_cast<size_t>(v.numel())};
}

// `left`: a function that returns those of some ranks that have left, or None.
std::vector<int> exchange(Mailbox& box, handle send, const std::vector<int64_t>& send_sizes, handle recv,
                          const std::vector<int64_t>& recv_sizes, double timeout, handle left) {
  const Bytes from = borrow_parts(send, send_sizes, "send"), to = borrow_parts(recv, recv_sizes, "recv");
  const std::less_equal<const char*> ends_before;
  require(from.n == 0 || to.n == 0 || ends_before(from.data + from.n, to.data) ||
              ends_before(to.data + to.n, from.data),
          "recv: shares memory with send");
  bool raised = false;
  std::vector<int> missing;
  {
    nb::gil_scoped_release release;
    missing = box.exchange(from.data, send_sizes, to.data, recv_sizes, timeout, [&](const std::vector<int>& ranks) {
      nb::gil_scoped_acquire acquire;
      raised = PyErr_CheckSignals() != 0;
      return raised || (!left.is_none() && nb::len(left(ranks)) > 0);
    });
  }
  if (raised) throw nb::python_error();
  return missing;
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  bind_messages(m);
  static nb::handle misuse = nb::object(nb::module_::import_("megalith.errors").attr("UsageError")).release();
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const MailboxMisuse& e) {
      PyErr_SetString(misuse.ptr(), e.what());
    } catch (const FileError& e) {
      const nb::object args = nb::make_tuple(e.code, e.what(), e.path);
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  nb::class_<Mailbox>(m, "Mailbox")
      .def(nb::init<const std::string&, int64_t, int64_t>(), nb::arg("path"), nb::arg("rank"),
           nb::arg("size"))
      .def("connect", &Mailbox::connect, nb::arg("paths"))
      .def("exchange", exchange, nb::arg("send"), nb::arg("send_sizes"), nb::arg("recv"),
           nb::arg("recv_sizes"), nb::arg("timeout"), nb::arg("left").none() = nb::none())
      .def("unlink", &Mailbox::unlink)
      .def("close", &Mailbox::close);
}

#else

void bind_mailbox(nb::module_& m) { bind_messages(m); }

#endif

}  // namespace megalith
