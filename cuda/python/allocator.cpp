#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "octavo/block_allocator.h"
#include "octavo/error.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

using Table = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

BlockTables block_tables(const Table& tables, const Vector& lengths) {
  if (lengths.shape(0) != tables.shape(0)) throw std::invalid_argument("tables and lengths differ in rows");
  return {tables.data(), lengths.data(), static_cast<int64_t>(tables.shape(0)), static_cast<int64_t>(tables.shape(1))};
}

std::span<const int32_t> span(const Vector& vector) { return {vector.data(), vector.shape(0)}; }

// OutOfBlocks is the engine's own error in Python: its type lives in engine/errors.py, looked up when first raised.
void translate_out_of_blocks(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const OutOfBlocks& out) {
    PyErr_SetString(nb::module_::import_("engine.errors").attr("OutOfBlocksError").ptr(), out.what());
  }
}

}  // namespace

void init_allocator(nb::module_& module) {
  nb::register_exception_translator(translate_out_of_blocks);
  using Blocks = std::vector<int64_t>;
  nb::class_<BlockAllocator>(module, "BlockAllocator", "The native engine.kv.allocator.BlockAllocator.")
      .def(nb::init<int64_t>(), "num_blocks"_a)
      .def_prop_ro("num_blocks", &BlockAllocator::num_blocks)
      .def_prop_ro("num_free", &BlockAllocator::num_free)
      .def_prop_ro("num_cached", &BlockAllocator::num_cached)
      .def_prop_ro("num_live", &BlockAllocator::num_live)
      .def("allocate", &BlockAllocator::allocate, "count"_a)
      .def(
          "retain", [](BlockAllocator& self, const Blocks& blocks) { self.retain(blocks); }, "blocks"_a)
      .def(
          "release", [](BlockAllocator& self, const Blocks& blocks) { self.release(blocks); }, "blocks"_a)
      .def("ref_count", &BlockAllocator::ref_count, "block"_a)
      .def("publish", &BlockAllocator::publish, "block"_a, "key"_a)
      .def(
          "publish_all",
          [](BlockAllocator& self, const Blocks& blocks, const std::vector<uint64_t>& keys) {
            return self.publish_all(blocks, keys);
          },
          "blocks"_a, "keys"_a)
      .def("find", &BlockAllocator::find, "key"_a)
      .def(
          "grow_tables",
          [](BlockAllocator& self, const Table& tables, const Vector& lengths, const Vector& rows,
             const Vector& wanted) {
            return self.grow_tables(block_tables(tables, lengths), span(rows), span(wanted));
          },
          "tables"_a.noconvert(), "lengths"_a.noconvert(), "rows"_a.noconvert(), "wanted"_a.noconvert())
      .def(
          "release_row",
          [](BlockAllocator& self, const Table& tables, const Vector& lengths, int64_t row) {
            self.release_row(block_tables(tables, lengths), row);
          },
          "tables"_a.noconvert(), "lengths"_a.noconvert(), "row"_a)
      .def("reset", &BlockAllocator::reset)
      .def("check", &BlockAllocator::check);
}

}  // namespace octavo::python
