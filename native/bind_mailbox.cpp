// The Python side of exchanges between the ranks of one host.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <string>
#include <vector>

#include "bind.hpp"
#if defined(__linux__)
#include "mailbox.hpp"
#endif

namespace megalith {

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

std::vector<int> exchange(Mailbox& box, handle send, const std::vector<int64_t>& send_sizes, handle recv,
                          const std::vector<int64_t>& recv_sizes, double timeout) {
  const Bytes from = borrow_parts(send, send_sizes, "send"), to = borrow_parts(recv, recv_sizes, "recv");
  const std::less_equal<const char*> ends_before;
  require(from.n == 0 || to.n == 0 || ends_before(from.data + from.n, to.data) ||
              ends_before(to.data + to.n, from.data),
          "recv: shares memory with send");
  bool raised = false;
  std::vector<int> missing;
  {
    nb::gil_scoped_release release;
    missing = box.exchange(from.data, send_sizes, to.data, recv_sizes, timeout, [&] {
      nb::gil_scoped_acquire acquire;
      return raised = PyErr_CheckSignals() != 0;
    });
  }
  if (raised) throw nb::python_error();
  return missing;
}

}  // namespace

void bind_mailbox(nb::module_& m) {
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
           nb::arg("recv_sizes"), nb::arg("timeout"))
      .def("unlink", &Mailbox::unlink)
      .def("close", &Mailbox::close);
}

#else

void bind_mailbox(nb::module_&) {}

#endif

}  // namespace megalith
