// Lets code that uses std::atomic_ref run on the model's machine, unchanged. Include this first,
// then the code.
#pragma once

#define JAX_INTRANODE_NO_VECTORS

#include "machine.h"

// All headers of the standard library that the code uses, before the names are replaced.
#include <atomic>
#include <bit>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

namespace model {

// What std::atomic_ref accesses. `Shared` says which word of the machine lies at an address, or -1:
// then the memory belongs to the threads of one rank, which the machine does not look at.
struct Memory {
  Machine* machine = nullptr;
  std::function<long(const void*)> shared;
  // Breaks the code: all loads, or all stores, are relaxed.
  bool no_acquire = false, no_release = false;
};
inline Memory& TheMemory() {
  static Memory memory;
  return memory;
}
inline Machine& TheMachine() { return *TheMemory().machine; }

}  // namespace model

namespace std {

template <class T>
class modelled_atomic_ref {
 public:
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  explicit modelled_atomic_ref(T& at) : at_(&at) {}

  T load(memory_order order) const {
    const long word = model::TheMemory().shared(at_);
    if (word < 0) return *at_;
    if constexpr (sizeof(T) == 8) return model::TheMachine().LoadPair(word);
    const bool relaxed = order == memory_order_relaxed || model::TheMemory().no_acquire;
    return model::TheMachine().Load(word,
                                    relaxed ? model::Order::kRelaxed : model::Order::kAcquire);
  }
  void store(T value, memory_order order) const {
    const long word = model::TheMemory().shared(at_);
    const bool relaxed = order == memory_order_relaxed || model::TheMemory().no_release;
    if (word < 0) {
      *at_ = value;
    } else if constexpr (sizeof(T) == 8) {
      model::TheMachine().StorePair(word, value);
    } else {
      model::TheMachine().Store(word, value,
                                relaxed ? model::Order::kRelaxed : model::Order::kRelease);
    }
  }
  // Only of a rank's own memory.
  T exchange(T value, memory_order) const {
    const T old = *at_;
    if (model::TheMemory().shared(at_) >= 0) model::TheMachine().Fail("exchanges a shared word");
    *at_ = value;
    return old;
  }

 private:
  T* at_;
};

}  // namespace std

#define atomic_ref modelled_atomic_ref
