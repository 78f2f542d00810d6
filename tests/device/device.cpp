// A device for tests, on PrivateUse1: what a GPU has, without a GPU.
//
// Its memory is memory of the CPU, and its kernels are those of the CPU. Everything else is its
// own: an allocator with statistics, generators, an autocast key, a device guard with two devices
// and so a thread of the autograd engine for each, streams and events. It counts every operation
// for which the host would have to wait for a GPU.
//
// [Note: aliases] An operation runs on CPU tensors that alias the memory of the device's tensors.
// What it returns becomes tensors of the device, again without a copy: a view of an argument is a
// view of the device's storage, and new memory is adopted by a storage of the device.
//
// What is not as on CUDA:
// - Work is done at once. Only copies between pinned memory and the device may be late: [Note: late
//   copies].
// - `x[mask] = 1.0` waits: only for CUDA, Python leaves the number on the host.
// - Memory that a kernel uses meanwhile is not counted, and memory is not cached or rounded up.
// - Every draw advances a generator by 4, whatever its size.
// - Attention is composed of matrix products, and there are no fused cells (LSTM, GRU), no sparse,
//   quantized or nested tensors.
// - Operations that draw and take no generator (`native_dropout`) use the default generator of the
//   CPU meanwhile, so two threads must not run them at once.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>
#include <torch/version.h>

// From ATen/autocast_mode.h, which takes long to compile.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(
    at::ScalarType to_type, const at::Tensor& arg, at::DeviceType device_type);
} // namespace at::autocast

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr DispatchKeySet KEYS(DispatchKey::PrivateUse1);
constexpr DispatchKeySet BITS({DispatchKey::Conjugate, DispatchKey::Negative});

thread_local DeviceIndex current = 0;

DeviceIndex checked(DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < DEVICES, "there is no device ", int(index));
  return index == -1 ? current : index;
}

bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == KIND;
}

// --- waits of the host for the device

std::mutex log_mutex;
std::vector<std::string> waits;
std::atomic<int64_t> uploads{0};

void waited(const std::string& name) {
  std::lock_guard<std::mutex> lock(log_mutex);
  waits.push_back(name);
}

// --- memory

struct Usage {
  int64_t now = 0, peak = 0, allocated = 0, freed = 0, blocks = 0;
};

std::mutex usage_mutex;
std::array<Usage, DEVICES> usages;

void count_allocation(DeviceIndex device, size_t bytes) {
  std::lock_guard<std::mutex> lock(usage_mutex);
  auto& usage = usages[device];
  usage.now += int64_t(bytes);
  usage.allocated += int64_t(bytes);
  usage.blocks += 1;
  usage.peak = std::max(usage.peak, usage.now);
}

void count_release(DeviceIndex device, size_t bytes) {
  std::lock_guard<std::mutex> lock(usage_mutex);
  auto& usage = usages[device];
  usage.now -= int64_t(bytes);
  usage.freed += int64_t(bytes);
  usage.blocks -= 1;
}

// Memory of the device: where it is, and who owns it.
struct Block {
  DeviceIndex device;
  size_t bytes;
  c10::DataPtr memory;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  count_release(block->device, block->bytes);
  delete block;
}

// Memory of the CPU as memory of the device.
c10::DataPtr adopt(c10::DataPtr memory, size_t bytes, DeviceIndex device) {
  void* address = memory.get();
  count_allocation(device, bytes);
  return {address, new Block{device, bytes, std::move(memory)}, &release, Device(KIND, device)};
}

void set_stat(c10::CachingAllocator::Stat& stat, const Usage& usage) {
  stat.current = usage.now;
  stat.peak = usage.peak;
  stat.allocated = usage.allocated;
  stat.freed = usage.freed;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return adopt(c10::GetDefaultCPUAllocator()->allocate(bytes), bytes, current);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context of a pointer is not its address
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    const auto& usage = usages[checked(device)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    set_stat(stats.allocated_bytes[0], usage);
    set_stat(stats.active_bytes[0], usage);
    set_stat(stats.reserved_bytes[0], usage);
    set_stat(stats.requested_bytes[0], usage);
    stats.allocation[0].current = usage.blocks;
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    usages[checked(device)].allocated = usages[checked(device)].freed = 0;
  }

  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(usage_mutex);
    usages[checked(device)].peak = usages[checked(device)].now;
  }
};

Allocator allocator;

// The same memory, of a device that has no statistics.
struct AllocatorWithoutStatistics final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocator.allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return allocator.raw_deleter();
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    allocator.copy_data(destination, source, bytes);
  }
};

AllocatorWithoutStatistics allocator_without_statistics;

// Pinned memory of the host: ordinary memory, of which we know that it is pinned.
std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned.count(address) > 0;
}

void release_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(address);
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(address);
    return {address, address, &release_pinned, Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

PinnedAllocator pinned_allocator;

// --- streams and events: [Note: late copies]
//
// Copies between pinned memory and the device that are made on a stream of their own wait in its
// queue, if they are to be late: until someone waits for an event that was recorded after them. So
// a wait that is missing shows in the values. Two more mistakes are counted as races: a copy on a
// stream that has not waited for the work of the default stream, and memory of the device that
// nobody holds any more when it is copied.
//
// Transfers take time, by a clock that nothing else moves: what events measure.

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;

thread_local std::array<c10::StreamId, DEVICES> streams{};
std::atomic<c10::StreamId> last_stream{0};

struct Event {
  StreamKey stream;
  int64_t copies; // how many its stream had been given
  int64_t work; // how many operations
  double clock;
};

// It does not hold the memory of the device, so that it notices if nobody does.
struct LateCopy {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  Tensor layout; // of the tensor on the device
  Tensor host;
  bool is_upload;
};

struct Queue {
  std::deque<LateCopy> copies;
  int64_t done = 0;
  int64_t work = 0;
  std::map<StreamKey, int64_t> seen; // the work of other streams that it has waited for
};

std::atomic<bool> is_late{false};
std::recursive_mutex queue_mutex;
std::map<StreamKey, Queue> queues;
std::vector<std::string> races;
double bandwidth = 1e10; // bytes a second
double clock_now = 0.0;

StreamKey current_stream_of(DeviceIndex device) {
  return {device, streams[device]};
}

void count_work(DeviceIndex device) {
  if (is_late) {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    queues[current_stream_of(device)].work += 1;
  }
}

void copy_now(const Tensor& target, const Tensor& source);

Tensor with_layout_of(const Tensor& tensor, Storage storage, DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

void catch_up(const StreamKey& stream, int64_t copies) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  auto& queue = queues[stream];
  while (queue.done < copies && !queue.copies.empty()) {
    auto copy = std::move(queue.copies.front());
    queue.copies.pop_front();
    queue.done += 1;
    auto memory = copy.memory.lock();
    if (!memory) {
      races.push_back("memory was freed before it was copied");
      continue;
    }
    auto there = with_layout_of(copy.layout, Storage(std::move(memory)), KEYS);
    copy_now(copy.is_upload ? there : copy.host, copy.is_upload ? copy.host : there);
  }
}

int64_t copies_of(const Queue& queue) {
  return queue.done + int64_t(queue.copies.size());
}

// Whether the copy is left for later.
bool is_left(const Tensor& target, const Tensor& source, bool is_async) {
  if (is_on_device(target) == is_on_device(source) || !is_async) {
    return false;
  }
  const auto& host = is_on_device(target) ? source : target;
  if (!is_pinned(host.storage().data())) {
    return false;
  }
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  clock_now += double(target.nbytes()) / bandwidth;
  auto device = (is_on_device(target) ? target : source).device().index();
  const auto key = current_stream_of(device);
  if (!is_late || key.second == 0) {
    return false;
  }
  const StreamKey home{device, 0};
  auto& queue = queues[key];
  if (queue.seen[home] < queues[home].work) {
    races.push_back("a copy did not wait for the default stream");
  }
  const bool is_upload = is_on_device(target);
  const auto& there = is_upload ? target : source;
  const auto& here = is_upload ? source : target;
  const auto cpu = DispatchKeySet(DispatchKey::CPU);
  Storage nothing(Storage::use_byte_size_t(), 0, at::DataPtr(), nullptr, false);
  queue.copies.push_back({
      c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
              there.storage().unsafeGetStorageImpl())),
      with_layout_of(there, std::move(nothing), cpu),
      with_layout_of(here, Storage(here.storage()), cpu),
      is_upload});
  return true;
}

// --- generators

// As on a GPU the state is a seed and an offset that each draw advances: 16 bytes. A draw takes its
// numbers from a CPU generator that is seeded with the two.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(Device(KIND, device), KEYS) {}

  static c10::DeviceType device_type() {
    return KIND;
  }

  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ + 0x9e3779b97f4a7c15ULL * (offset_ / 4 + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }

  uint64_t get_offset() const override {
    return offset_;
  }

  uint64_t current_seed() const override {
    return seed_;
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.is_contiguous() &&
            state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.numel() == 16,
        "a state of this generator is 16 bytes on the CPU");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<Generator>(checked(device));
}

const at::Generator& default_generator(DeviceIndex device) {
  static const std::array<at::Generator, DEVICES> defaults{new_generator(0), new_generator(1)};
  return defaults[checked(device)];
}

at::Generator drawn_from(const c10::IValue& argument, DeviceIndex device) {
  const auto& generator = argument.isNone() ? default_generator(device) : argument.toGenerator();
  TORCH_CHECK(
      generator.device().type() == KIND,
      "Expected a generator of the device, but found one of ",
      generator.device());
  return at::check_generator<Generator>(generator)->draw();
}

// An operation that draws and takes no generator uses the default one of the CPU.
struct LendDefaultGenerator {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Generator before = cpu.clone();

  explicit LendDefaultGenerator(DeviceIndex device) {
    set(drawn_from({}, device));
  }

  ~LendDefaultGenerator() {
    set(before);
  }

  void set(const at::Generator& other) {
    std::lock_guard<std::mutex> lock(cpu.mutex());
    cpu.unsafeGetGeneratorImpl()->set_state(*other.unsafeGetGeneratorImpl()->get_state());
  }
};

// --- operations: [Note: aliases]

// What is to be known of an operation.
struct Facts {
  std::string name;
  std::vector<size_t> generators; // the positions of these arguments
  bool draws_from_default = false;
  bool waits = false;
  bool takes_indices = false;
};

const std::unordered_set<std::string> WAITING = {
    "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "masked_select",
    "multinomial", "nonzero", "nonzero_numpy", "repeat_interleave", "unique_consecutive",
    "unique_dim", "unique_dim_consecutive"};

const std::unordered_set<std::string> INDEXING = {
    "index", "index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index",
    "_unsafe_index_put"};

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::map<const void*, Facts> known;
  const auto& schema = op.schema();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(&schema);
  if (found != known.end()) {
    return found->second;
  }
  Facts facts;
  facts.name = schema.name().substr(schema.name().find("::") + 2);
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().rfind("Generator", 0) == 0) {
      facts.generators.push_back(i);
    }
  }
  facts.draws_from_default =
      facts.generators.empty() && op.hasTag(at::Tag::nondeterministic_seeded);
  facts.waits = WAITING.count(facts.name) > 0;
  facts.takes_indices = INDEXING.count(facts.name) > 0;
  return known.emplace(&schema, std::move(facts)).first->second;
}

void release_storage(void* context) {
  delete static_cast<Storage*>(context);
}

class Aliases {
 public:
  // A tensor of the CPU with the memory of one of the device.
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!is_on_device(tensor)) {
      has_host_values_ = has_host_values_ || (tensor.device().is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == at::kStrided, "the device has strided tensors only");
    on(tensor.device());
    auto keys = DispatchKeySet(DispatchKey::CPU) | bits_of(tensor);
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        Storage(host_of(tensor.storage())), keys, tensor.dtype());
    copy_layout(tensor, host);
    tensors_.emplace_back(tensor, host);
    return host;
  }

  // A tensor of the device with the memory of one of the CPU, which an operation returned.
  Tensor to_device(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) {
      return host;
    }
    for (const auto& pair : tensors_) {
      if (pair.second.is_same(host)) {
        return pair.first;
      }
    }
    TORCH_CHECK(host.layout() == at::kStrided, "the device has strided tensors only");
    auto tensor = with_memory_of(host);
    copy_layout(host, tensor);
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return tensor;
  }

  // An operation may have resized the tensors that it wrote.
  void take_over_sizes() {
    for (auto& [tensor, host] : tensors_) {
      const auto& storage = tensor.storage();
      if (host.storage().data() != storage.data() || host.storage().nbytes() != storage.nbytes()) {
        auto memory = keep(host.storage());
        auto bytes = host.storage().nbytes();
        auto* impl = storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopt(std::move(memory), bytes, storage.device().index()));
        impl->set_nbytes(bytes);
      }
      if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides()) {
        copy_layout(host, tensor);
      }
    }
  }

  void on(Device device) {
    TORCH_CHECK(
        !device_ || *device_ == device,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_,
        " and ",
        device,
        "!");
    device_ = device;
  }

  void check_devices() const {
    TORCH_CHECK(
        !has_host_values_ || !device_,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_,
        " and cpu!");
  }

  DeviceIndex device() const {
    return device_ && device_->has_index() ? device_->index() : current;
  }

  static void copy_layout(const Tensor& from, const Tensor& to) {
    auto* impl = to.unsafeGetTensorImpl();
    impl->set_storage_offset(from.storage_offset());
    impl->set_sizes_and_strides(from.sizes(), from.strides());
  }

 private:
  Tensor with_memory_of(const Tensor& host) {
    for (const auto& [argument, alias] : tensors_) {
      if (alias.is_alias_of(host)) { // a view, with the keys of its base
        auto keys = (argument.key_set() - BITS) | bits_of(host);
        return at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, Storage(argument.storage()), keys, host.dtype());
      }
    }
    return at::detail::make_tensor<c10::TensorImpl>(
        Storage(device_of(host.storage())), KEYS | bits_of(host), host.dtype());
  }

  static DispatchKeySet bits_of(const Tensor& tensor) {
    return tensor.key_set() & BITS;
  }

  static c10::DataPtr keep(const Storage& storage) {
    auto cpu = Device(c10::DeviceType::CPU);
    return {storage.mutable_data(), new Storage(storage), &release_storage, cpu};
  }

  Storage host_of(const Storage& storage) {
    for (const auto& pair : storages_) {
      if (pair.first.is_alias_of(storage)) {
        return pair.second;
      }
    }
    Storage host(
        Storage::use_byte_size_t(), storage.nbytes(), keep(storage), c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, host);
    return host;
  }

  Storage device_of(const Storage& host) {
    for (const auto& pair : storages_) {
      if (pair.second.is_alias_of(host)) {
        return pair.first;
      }
    }
    auto memory = adopt(keep(host), host.nbytes(), device());
    Storage storage(
        Storage::use_byte_size_t(), host.nbytes(), std::move(memory), &allocator, true);
    storages_.emplace_back(storage, host);
    return storage;
  }

  std::vector<std::pair<Storage, Storage>> storages_; // of the device, of the CPU
  std::vector<std::pair<Tensor, Tensor>> tensors_; // the arguments: of the device, of the CPU
  std::optional<Device> device_;
  bool has_host_values_ = false;
};

bool is_mask(const std::optional<Tensor>& index) {
  return index && index->defined() &&
      (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
}

// To index with a mask, the host has to know how many elements that are.
bool waits_for_mask(const Facts& facts, c10::ArrayRef<c10::IValue> arguments) {
  if (!facts.takes_indices || !arguments[1].isOptionalTensorList()) {
    return false;
  }
  const auto indices = arguments[1].toOptionalTensorVector();
  if (std::none_of(indices.begin(), indices.end(), is_mask)) {
    return false;
  }
  // A number of the host is written by `masked_fill_`, which waits for nothing.
  bool is_put = arguments.size() > 3 && arguments[2].isTensor() && arguments[3].isBool();
  return !is_put || arguments[3].toBool() || arguments[2].toTensor().numel() != 1 ||
      is_on_device(arguments[2].toTensor());
}

bool waits_for_values(const Facts& facts, c10::ArrayRef<c10::IValue> arguments) {
  if (facts.name == "equal") { // of other sizes, or empty: nothing is to be read
    const auto& a = arguments[0].toTensor();
    const auto& b = arguments[1].toTensor();
    return a.sizes() == b.sizes() && a.numel() > 0;
  }
  if (facts.name == "repeat_interleave") {
    return arguments.back().isNone(); // the size of the output is not given
  }
  return facts.waits;
}

c10::IValue argument_to_host(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    return aliases.to_host(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) {
      tensors.push_back(aliases.to_host(tensor));
    }
    return c10::List<Tensor>(tensors);
  }
  if (value.isOptionalTensorList()) {
    std::vector<std::optional<Tensor>> tensors;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional<Tensor>(aliases.to_host(*tensor)) : std::nullopt);
    }
    return c10::List<std::optional<Tensor>>(tensors);
  }
  if (value.isDevice() && value.toDevice().type() == KIND) {
    aliases.on(Device(KIND, checked(value.toDevice().index())));
    return Device(c10::DeviceType::CPU);
  }
  return value;
}

c10::IValue result_to_device(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    return aliases.to_device(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) {
      tensors.push_back(aliases.to_device(tensor));
    }
    return c10::List<Tensor>(tensors);
  }
  return value;
}

// Every operation that has no kernel of its own.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& facts = facts_of(op);
  const auto count = op.schema().arguments().size();
  const auto first = stack->size() - count;
  auto arguments = torch::jit::last(*stack, count);
  if (waits_for_values(facts, arguments) || waits_for_mask(facts, arguments)) {
    waited(facts.name);
  }
  Aliases aliases;
  for (size_t i = 0; i < count; ++i) {
    (*stack)[first + i] = argument_to_host((*stack)[first + i], aliases);
  }
  if (!facts.takes_indices) {
    aliases.check_devices();
  }
  for (auto position : facts.generators) {
    (*stack)[first + position] = drawn_from((*stack)[first + position], aliases.device());
  }
  {
    std::optional<LendDefaultGenerator> lent;
    if (facts.draws_from_default) {
      lent.emplace(aliases.device());
    }
    c10::impl::ExcludeDispatchKeyGuard without_autocast(DispatchKey::AutocastCPU);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  aliases.take_over_sizes();
  count_work(aliases.device());
  const auto returns = op.schema().returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    (*stack)[i] = result_to_device((*stack)[i], aliases);
  }
}

// --- kernels of its own

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> is_pinned,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!is_pinned.value_or(false), "Only tensors of the CPU can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the device has strided tensors only");
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(
      size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> is_pinned) {
  TORCH_CHECK(!is_pinned.value_or(false), "Only tensors of the CPU can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the device has strided tensors only");
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    return {nullptr, Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, size_t) const override {}
};

// Zeros without memory, which autograd uses for gradients that are not there.
Tensor efficient_zeros(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  static NoMemory none;
  const c10::DeviceGuard guard(*device);
  auto keys = KEYS | DispatchKeySet(DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}

void count_copy(const Tensor& self, const Tensor& source, bool is_async) {
  if (self.numel() == 0 || is_on_device(self) == is_on_device(source)) {
    return;
  }
  if (is_on_device(self)) {
    uploads += is_async ? 0 : 1;
  } else if (!is_async || !is_pinned(self.storage().data())) {
    waited("copy_");
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool is_async) {
  if (self.is_same(source) || self.is_meta()) {
    return self;
  }
  TORCH_CHECK(!source.is_meta(), "Cannot copy out of meta tensor; no data!");
  if (source._is_zerotensor()) {
    return self.zero_();
  }
  count_copy(self, source, is_async);
  if (!is_left(self, source, is_async)) {
    copy_now(self, source);
  }
  return self;
}

void copy_now(const Tensor& target, const Tensor& source) {
  // The two may be on different devices.
  Aliases of_target;
  Aliases of_source;
  of_target.to_host(target).copy_(of_source.to_host(source));
}

Tensor copy_from(const Tensor& source, const Tensor& self, bool is_async) {
  auto target = self;
  return copy_(target, source, is_async);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& self) {
  self.resize_(source.sizes());
  return copy_from(source, self, false);
}

void record_stream(Tensor&, c10::Stream) {}

// Whether `.data` of one can be set to the other: as between the CPU and a GPU, so that parameters
// are the same objects when a module moves.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_on_device(tensor));
  };
  return is_dense(self) && is_dense(from);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  // They have no kernel for the CPU by themselves, and none that a device could use.
  for (const auto* name : {"convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// The device has a kernel of its own for every operation that the CPU has one for. Otherwise torch
// would compose some of them of others.
void register_kernels() {
  static torch::Library library(
      torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CPU)) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op &&
        !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

// --- autocast

void run_cast(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without_autocast(DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), KIND);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const auto& tensor : value.toTensorVector()) {
        tensors.push_back(at::autocast::cached_cast(dtype, tensor, KIND));
      }
      value = c10::List<Tensor>(tensors);
    }
  }
  op.callBoxed(stack);
}

void run_lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(at::autocast::get_autocast_dtype(KIND), op, stack);
}

void run_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(at::kFloat, op, stack);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
// Later versions have one: operators without a derivative just run.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
#endif

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name :
       {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d",
        "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
        "einsum", "linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_lower>());
  }
  for (const auto* name :
       {"binary_cross_entropy_with_logits", "cosine_embedding_loss", "cosine_similarity",
        "cross_entropy_loss", "cumsum", "exp", "group_norm", "kl_div", "l1_loss", "layer_norm",
        "log", "log_softmax.int", "mse_loss", "nll_loss", "norm.Scalar", "pow.Tensor_Scalar",
        "prod", "rsqrt", "smooth_l1_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_float32>());
  }
}

// --- devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;

  c10::DeviceType type() const override {
    return KIND;
  }

  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  Device getDevice() const override {
    return {KIND, current};
  }

  void setDevice(Device device) const override {
    current = checked(device.index());
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    current = std::max(device.index(), DeviceIndex(0));
  }

  c10::Stream getStream(Device device) const override {
    auto index = checked(device.index());
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index), streams[index]);
  }

  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, checked(device.index())), 0);
  }

  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream getNewStream(Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, checked(device.index())), ++last_stream);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }

  DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    const StreamKey key{stream.device_index(), stream.id()};
    const auto& queue = queues[key];
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {key, copies_of(queue), queue.work, clock_now};
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    const auto& recorded = *static_cast<Event*>(event);
    catch_up(recorded.stream, recorded.copies);
    auto& seen = queues[{stream.device_index(), stream.id()}].seen[recorded.stream];
    seen = std::max(seen, recorded.work);
  }

  bool queryEvent(void*) const override {
    return true;
  }

  bool queryStream(const c10::Stream&) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    waited("synchronize stream");
    catch_up({stream.device_index(), stream.id()}, INT64_MAX);
  }

  void synchronizeEvent(void* event) const override {
    waited("synchronize event");
    if (event != nullptr) {
      catch_up(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->copies);
    }
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(device);
  }

  static void synchronize(DeviceIndex device) {
    waited("synchronize");
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    for (auto& [key, _] : queues) {
      if (key.first == device) {
        catch_up(key, INT64_MAX);
      }
    }
  }

  double elapsedTime(void* before, void* after, const DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(after)->clock - static_cast<Event*>(before)->clock);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }

  Device getDeviceFromPtr(void*) const override {
    return {KIND, current};
  }

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }

  DeviceIndex deviceCount() const override {
    return DEVICES;
  }

  void setCurrentDevice(DeviceIndex device) const override {
    current = checked(device);
  }

  DeviceIndex getCurrentDevice() const override {
    return current;
  }

  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, checked(device));
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(bytes);
    auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      std::memcpy(memory.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// --- for Python

pybind11::object usage_of(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(usage_mutex);
  const auto& usage = usages[checked(device)];
  return pybind11::make_tuple(usage.now, usage.peak);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(KIND, &allocator);
  register_kernels();
  m.def("device_count", []() { return int(DEVICES); });
  m.def("current_device", []() { return int(current); });
  m.def("set_device", [](int device) { current = checked(DeviceIndex(device)); });
  m.def("default_generator", [](int device) {
    auto* generator = THPGenerator_Wrap(default_generator(DeviceIndex(device)));
    return py::reinterpret_steal<py::object>(generator);
  });
  m.def("usage", [](int device) { return usage_of(DeviceIndex(device)); });
  m.def("reset_peak", [](int device) { allocator.resetPeakStats(DeviceIndex(device)); });
  m.def("set_statistics", [](bool has_statistics) {
    if (has_statistics) {
      c10::SetAllocator(KIND, &allocator);
    } else {
      c10::SetAllocator(KIND, &allocator_without_statistics);
    }
  });
  m.def("synchronize", []() { Guard::synchronize(current); });
  m.def("set_late", [](bool late) {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    for (auto& [key, _] : queues) {
      catch_up(key, INT64_MAX);
    }
    is_late = late;
    races.clear();
  });
  m.def("set_bandwidth", [](double bytes) { bandwidth = bytes; });
  m.def("races", []() {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    return races;
  });
  m.def("waits", []() {
    std::lock_guard<std::mutex> lock(log_mutex);
    return waits;
  });
  m.def("uploads", []() { return uploads.load(); });
  m.def("reset_waits", []() {
    std::lock_guard<std::mutex> lock(log_mutex);
    waits.clear();
    uploads = 0;
  });
}
