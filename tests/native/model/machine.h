// An exhaustive checker of protocols over shared memory.
//
// The threads of a program run as fibers on this machine. All their accesses to shared memory go
// through it. It searches all behaviours that the memory model below allows, and stops at the first
// one that is wrong.
//
// The memory model: C++'s, without consume and without sequentially consistent order. PTX's model
// is the same for scopes that contain all threads. Each 32-bit word has a list of the values
// stored to it, in coherence order. A thread has a view: for each word, the oldest value that it
// may still read.
//   A relaxed load may return any value that its view allows. So loads seem to be reordered.
//   A relaxed store may take any place in the list after the thread's view. So stores become
//   visible in any order, to each thread in another one.
//   An acquire operation adds to the view what the thread that released had in its view.
//   A 64-bit access is atomic. If it races with a 32-bit access of the same bytes, it is an error.
//   Two plain accesses that race are an error, too.
// What the model leaves out: a store that becomes visible before an earlier load of the same thread
// has its value. The protocols store nothing for others before a branch on what they have loaded,
// and hardware keeps that order; where plain data are read before a slot is given back, the missing
// order is found as a race.
//
// What the search leaves out, without loss:
//   A thread runs on until it is about to load something that others may store. A store only adds
//   to what others may read, so it may as well happen early.
//   The loads of one look at a set of words happen at the same point. A value that could be read
//   before can still be read then.
//   A look that ends in Wait() is taken back: it did nothing but narrow the thread's own view. If
//   no thread can get past its wait, whatever it reads, that is a wait without end.
//
// States are told apart by 128 bits of a hash, and no state is visited twice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fiber.h"

namespace model {

enum class Order { kRelaxed, kAcquire, kRelease };

// What is known of a program at one point of the search.

using Words = std::vector<uint32_t>;
constexpr int kMost = 14;           // values of a word that can still be read
constexpr uint32_t kGap = 1 << 12;  // between the times of adjacent values

enum class Width : uint8_t { kInitial, kWord, kPair };
enum class At : uint8_t { kLocal, kLook, kBarrier, kCondition };

struct Message {
  uint32_t value;
  uint32_t time;     // its place in the coherence order of its word
  int32_t released;  // the view that an acquire operation gets, in views_; -1: none
  uint16_t pair;     // which 64-bit store it belongs to
  Width width;
};
struct Thread {
  Words now;       // its view: of each word the time, then how far it has seen each thread
  Words acquired;  // what an acquire fence would add
  int32_t released = -1;
  uint64_t history = 1;
  bool ended = false, looking = false;
  int barrier = -1;
  At at = At::kLocal;
  const std::function<bool()>* ready = nullptr;
};
struct Plain {
  uint64_t value = 0;
  int writer = 0;
  uint32_t written = 0;
};
struct State {
  std::vector<Message> messages;
  std::vector<uint8_t> counts;
  std::vector<Thread> threads;
  std::vector<Plain> plain;
  Words reads;  // when each thread has read each object
  std::vector<char> local;
  uint16_t pairs = 0;
};
struct Snapshot {
  State state;
  std::vector<Fiber::Saved> fibers;
  size_t views;
};
struct Choice {
  uint8_t chosen, of;
};
struct Step {
  int thread;
  std::vector<Choice> choices;
};
struct Key {
  uint64_t a, b;
  bool operator==(const Key&) const = default;
};
struct HashKey {
  size_t operator()(const Key& key) const { return key.a; }
};

class Machine {
 public:
  static constexpr const char* kEndless = "a wait without end";
  static constexpr const char* kMixed = "wrong: accesses of 32 and 64 bits race";

  struct Result {
    std::string error;  // empty if every behaviour is right
    size_t states = 0, steps = 0;
    double interleavings = 0;  // of the steps, from the begin to an end
    std::vector<std::string> trace;
  };

  // `initial` is the value of all words. `word_name` says what a word is, for traces.
  Machine(size_t words, uint32_t initial, size_t plain_objects) : words_(words) {
    state_.messages.assign(words * kMost, Message{});
    state_.counts.assign(words, 1);
    for (size_t w = 0; w < words; ++w) {
      state_.messages[w * kMost] = Message{initial, kGap, -1, 0, Width::kInitial};
    }
    state_.plain.resize(plain_objects);
  }

  void SetInitial(size_t word, uint32_t value) { At(word, 0).value = value; }
  // A thread for each block of each rank.
  template <class Run>
  void AddBlocks(int ranks, int blocks, Run run) {
    for (int r = 0; r < ranks; ++r) {
      for (int b = 0; b < blocks; ++b) {
        names_.push_back("rank " + std::to_string(r) + " block " + std::to_string(b));
        bodies_.push_back([run, r, b] { run(r, b); });
      }
    }
  }
  // Memory that threads access without the machine, and that belongs to the state. Threads that run
  // at the same time must not both access it, except in the condition of Await().
  void AddLocalMemory(void* at, size_t bytes) {
    local_.push_back({static_cast<char*>(at), bytes});
    state_.local.resize(state_.local.size() + bytes);
  }
  // Called when all threads have ended. Calls Fail() if something is wrong.
  void OnEnd(std::function<void()> check) { on_end_ = std::move(check); }
  void NameWords(std::function<std::string(size_t)> name) { word_name_ = std::move(name); }

  Result Search() {
    const size_t threads = bodies_.size();
    state_.reads.assign(state_.plain.size() * threads, 0);
    state_.threads.resize(threads);
    for (size_t t = 0; t < threads; ++t) {
      state_.threads[t].now.assign(words_ + threads, 0);
      for (size_t w = 0; w < words_; ++w) state_.threads[t].now[w] = kGap;
      state_.threads[t].now[words_ + t] = 1;
      state_.threads[t].acquired = state_.threads[t].now;
      fibers_.push_back(std::make_unique<Fiber>());
      fibers_[t]->Start([this, t] {
        bodies_[t]();
        state_.threads[t].ended = true;
      });
    }
    const Snapshot first = Save();
    result_.interleavings = Visit();
    if (!result_.error.empty()) {
      // Runs the same steps again, and notes what they do.
      const std::string error = result_.error;
      const std::vector<Step> steps = path_;
      Restore(first);
      tracing_ = true;
      for (const Step& step : steps) Run(step.thread, step.choices);
      for (size_t t = 0; t < threads && error == kEndless; ++t) {
        if (CanRun(state_.threads[t])) Run(static_cast<int>(t), {});
      }
      result_.error = error;
    }
    return result_;
  }

  // What follows is for threads of the program.

  uint32_t Load(size_t word, Order order) {
    BeforeLoad();
    if (IsMixed(word, Width::kPair)) return Fail(kMixed), 0;
    const int count = state_.counts[word];
    const int i = count - 1 - Choose(count - Oldest(word));
    Observe(Me(), word, i, order);
    const uint32_t value = At(word, i).value;
    Remember(value);
    if (tracing_) Trace("loads " + Name(word) + " = " + Hex(value));
    return value;
  }

  void Store(size_t word, uint32_t value, Order order) {
    BeforeStore();
    const int first = Oldest(word), count = state_.counts[word];
    const int at = count - Choose(count - first);
    Insert(word, at, Message{value, 0, View(order), 0, Width::kWord});
    if (tracing_) Trace("stores " + Name(word) + " = " + Hex(value) + Place(word, at));
  }

  // Two adjacent words that are accessed as one.
  uint64_t LoadPair(size_t word, Order order = Order::kRelaxed) {
    BeforeLoad();
    const size_t high = word + 1;
    if (IsMixed(word, Width::kWord) || IsMixed(high, Width::kWord)) return Fail(kMixed), 0;
    const auto [i, j] = ChooseCut(word);
    Observe(Me(), word, i - 1, order);
    Observe(Me(), high, j - 1, order);
    const uint64_t value = At(word, i - 1).value | uint64_t{At(high, j - 1).value} << 32;
    Remember(value);
    if (tracing_) Trace("loads " + Name(word) + ", 64 bits = " + Hex(value));
    return value;
  }

  void StorePair(size_t word, uint64_t value) {
    BeforeStore();
    const auto [i, j] = ChooseCut(word);
    const int32_t released = Me().released;
    const uint16_t pair = ++state_.pairs;
    Insert(word, i, Message{static_cast<uint32_t>(value), 0, released, pair, Width::kPair});
    const auto high = static_cast<uint32_t>(value >> 32);
    Insert(word + 1, j, Message{high, 0, released, pair, Width::kPair});
    if (tracing_) Trace("stores " + Name(word) + ", 64 bits = " + Hex(value) + Place(word, i));
  }

  void AcquireFence() {
    Thread& t = Me();
    Join(&t.now, t.acquired);
  }
  void ReleaseFence() { Me().released = Pool(Me().now); }
  void Fence() {
    AcquireFence();
    ReleaseFence();
  }

  // Plain memory. Two accesses of which one is a store must be ordered.
  uint64_t Read(size_t object) {
    Plain& plain = state_.plain[object];
    Thread& t = Me();
    if (t.now[words_ + plain.writer] < plain.written)
      return Fail("wrong: a load races with a store"), 0;
    dirty_ = true;
    ReadsOf(object)[current_] = t.now[words_ + current_];
    Remember(plain.value);
    if (tracing_) Trace("reads object " + std::to_string(object) + " = " + Hex(plain.value));
    return plain.value;
  }
  void Write(size_t object, uint64_t value) {
    Plain& plain = state_.plain[object];
    Thread& t = Me();
    dirty_ = true;
    if (t.now[words_ + plain.writer] < plain.written) return Fail("wrong: two stores race");
    for (size_t r = 0; r < state_.threads.size(); ++r) {
      if (t.now[words_ + r] < ReadsOf(object)[r]) return Fail("wrong: a store races with a load");
    }
    plain.value = value;
    plain.writer = current_;
    plain.written = t.now[words_ + current_];
    if (tracing_) Trace("writes object " + std::to_string(object) + " = " + Hex(value));
  }

  // The look at shared memory that ends here has not found what it waits for.
  void Wait() {
    if (tracing_) Trace("must wait");
    waits_ = true;
    Me().looking = false;
    Yield(At::kLook);
  }

  // One of the numbers 0 ... n - 1: the search tries all of them.
  int Pick(int n) {
    const int picked = Choose(n);
    Remember(picked);
    if (tracing_) Trace("picks " + std::to_string(picked));
    return picked;
  }

  // Waits until `count` threads have called it with this number, which is used once. Everything
  // that they did before happens before what they do afterwards.
  void Barrier(int number, int count) {
    dirty_ = true;
    Thread& me = Me();
    me.barrier = number;
    int arrived = 0;
    for (const Thread& t : state_.threads) arrived += t.barrier == number;
    if (arrived == count) {
      Words joined(words_ + state_.threads.size(), 0);
      for (Thread& t : state_.threads) {
        if (t.barrier == number) Join(&joined, t.now);
      }
      for (size_t i = 0; i < state_.threads.size(); ++i) {
        Thread& t = state_.threads[i];
        if (t.barrier != number) continue;
        t.now = joined;
        ++t.now[words_ + i];
        t.barrier = -1;
        t.at = At::kLocal;
        Mix(&t.history, 77);
      }
    } else {
      me.at = At::kBarrier;
    }
    me.looking = false;
    Fiber::Yield();
  }

  // Suspends the thread until `ready()`, which must depend on local memory only.
  void Await(const std::function<bool()>& ready) {
    Me().ready = &ready;
    Me().looking = false;
    if (!ready()) Yield(At::kCondition);
    Me().ready = nullptr;
  }

  // All that the thread still knows at this point of its program follows from `known`. (Otherwise
  // states count as different if the thread has loaded other values before.)
  void Forget(uint64_t known) {
    Me().history = 1;
    Mix(&Me().history, known);
  }
  int current() const { return current_; }
  // The last value of a word in coherence order.
  uint32_t Newest(size_t word) { return At(word, state_.counts[word] - 1).value; }

  // Ends the search.
  void Fail(const std::string& error) {
    if (result_.error.empty()) result_.error = error;
    if (tracing_) Trace("error: " + error);
    failed_ = true;
    if (running_) {
      for (;;) Fiber::Yield();
    }
  }

 private:
  int Choose(int n) {
    if (n <= 1) return 0;
    if (n > 255) return Fail("too many choices"), 0;
    if (position_ == choices_.size()) choices_.push_back({0, static_cast<uint8_t>(n)});
    return choices_[position_++].chosen;
  }

  uint32_t* ReadsOf(size_t object) { return &state_.reads[object * state_.threads.size()]; }
  Thread& Me() { return state_.threads[current_]; }
  Message& At(size_t word, int i) { return state_.messages[word * kMost + i]; }

  static void Join(Words* to, const Words& from) {
    for (size_t i = 0; i < to->size(); ++i) (*to)[i] = std::max((*to)[i], from[i]);
  }
  static void Mix(uint64_t* hash, uint64_t value) {
    *hash = (*hash ^ value) * 0x9E3779B97F4A7C15u;
    *hash ^= *hash >> 29;
  }
  void Remember(uint64_t value) { Mix(&Me().history, value + 3); }

  // The first value of a word that the running thread may read.
  int Oldest(size_t word) {
    const uint32_t time = Me().now[word];
    int i = 0;
    while (At(word, i).time < time) ++i;
    return i;
  }

  // Whether a value that may be read, but for the oldest one, was stored with another width.
  bool IsMixed(size_t word, Width other) {
    for (int i = Oldest(word) + 1; i < state_.counts[word]; ++i) {
      if (At(word, i).width == other) return true;
    }
    return false;
  }

  // Where a word has what a 64-bit store has stored; -1: everybody has seen it, and it was dropped.
  int PlaceOf(uint16_t pair, size_t word) {
    int place = state_.counts[word] - 1;
    while (place >= 0 && (At(word, place).width != Width::kPair || At(word, place).pair != pair)) {
      --place;
    }
    return place;
  }

  // Whether values up to the i-th of a word and up to the j-th of the next word can be all that has
  // been stored, as far as 64-bit stores go.
  bool IsCut(size_t word, int i, int j) {
    for (int k = 0; k < state_.counts[word]; ++k) {
      const Message& low = At(word, k);
      if (low.width == Width::kPair && (k < i) != (PlaceOf(low.pair, word + 1) < j)) return false;
    }
    for (int k = 0; k < state_.counts[word + 1]; ++k) {
      const Message& high = At(word + 1, k);
      if (high.width == Width::kPair && (PlaceOf(high.pair, word) < i) != (k < j)) return false;
    }
    return true;
  }

  // One of the cuts that the thread's view allows.
  std::pair<int, int> ChooseCut(size_t word) {
    std::vector<std::pair<int, int>> cuts;
    for (int i = state_.counts[word]; i > Oldest(word); --i) {
      for (int j = state_.counts[word + 1]; j > Oldest(word + 1); --j) {
        if (IsCut(word, i, j)) cuts.push_back({i, j});
      }
    }
    if (cuts.empty()) Fail("no value to load");
    return cuts[Choose(static_cast<int>(cuts.size()))];
  }

  void Observe(Thread& t, size_t word, int i, Order order) {
    const Message& m = At(word, i);
    t.now[word] = std::max(t.now[word], m.time);
    t.acquired[word] = std::max(t.acquired[word], m.time);
    if (m.released < 0) return;
    Join(&t.acquired, *views_[m.released]);
    if (order == Order::kAcquire) Join(&t.now, *views_[m.released]);
  }

  // Keeps a view for those who acquire it. What the thread does later is not part of it.
  int32_t Pool(const Words& view) {
    views_.push_back(std::make_unique<Words>(view));
    ++Me().now[words_ + current_];
    dirty_ = true;
    return static_cast<int32_t>(views_.size()) - 1;
  }
  int32_t View(Order order) { return order == Order::kRelease ? Pool(Me().now) : Me().released; }

  void Insert(size_t word, int at, Message message) {
    const int count = state_.counts[word];
    if (count == kMost) return Fail("a word has more values than the checker has room for");
    const uint32_t before = At(word, at - 1).time;
    message.time = at == count ? before + kGap : before + (At(word, at).time - before) / 2;
    if (message.time == before) return Fail("stores race more often than the checker allows");
    for (int i = count; i > at; --i) At(word, i) = At(word, i - 1);
    At(word, at) = message;
    ++state_.counts[word];
    Me().now[word] = message.time;
    Me().acquired[word] = std::max(Me().acquired[word], message.time);
  }

  void BeforeLoad() {
    if (std::exchange(Me().looking, true)) return;
    Yield(At::kLook);
  }
  void BeforeStore() {
    dirty_ = true;
    Me().looking = false;
    Mix(&Me().history, 5);
  }
  void Yield(enum At at) {
    Me().at = at;
    Fiber::Yield();
    Me().at = At::kLocal;
  }

  Snapshot Save() {
    char* to = state_.local.data();
    for (const auto& [at, bytes] : local_) {
      memcpy(to, at, bytes);
      to += bytes;
    }
    Snapshot snapshot{state_, {}, views_.size()};
    snapshot.fibers.resize(fibers_.size());
    for (size_t i = 0; i < fibers_.size(); ++i) fibers_[i]->Save(&snapshot.fibers[i]);
    return snapshot;
  }
  void Restore(const Snapshot& from) {
    state_ = from.state;
    views_.resize(from.views);
    const char* saved = state_.local.data();
    for (const auto& [at, bytes] : local_) {
      memcpy(at, saved, bytes);
      saved += bytes;
    }
    for (size_t i = 0; i < fibers_.size(); ++i) fibers_[i]->Restore(from.fibers[i]);
  }

  // Drops values that no thread may read any more.
  void Collect() {
    for (size_t word = 0; word < words_; ++word) {
      if (state_.counts[word] == 1) continue;
      uint32_t oldest = ~0u;
      for (const Thread& t : state_.threads) {
        if (!t.ended) oldest = std::min(oldest, t.now[word]);
      }
      int keep = 0;
      while (keep + 1 < state_.counts[word] && At(word, keep + 1).time <= oldest) ++keep;
      if (keep == 0) continue;
      for (int i = keep; i < state_.counts[word]; ++i) At(word, i - keep) = At(word, i);
      state_.counts[word] -= keep;
    }
  }

  Key HashState() {
    Key key{11, 13};
    const auto mix = [&](uint64_t value) {
      Mix(&key.a, value);
      key.b = (key.b + value) * 0xD6E8FEB86659FD93u;
      key.b ^= key.b >> 32;
    };
    const auto mix_view = [&](const Words& view) {
      for (uint32_t time : view) mix(time);
    };
    std::vector<uint64_t> views(views_.size(), 0);
    const auto mix_released = [&](int32_t released) {
      if (released < 0) return mix(1);
      uint64_t& hash = views[released];
      if (hash == 0) {
        hash = 17;
        for (uint32_t time : *views_[released]) Mix(&hash, time);
      }
      mix(hash);
    };
    for (size_t word = 0; word < words_; ++word) {
      mix(state_.counts[word]);
      for (int i = 0; i < state_.counts[word]; ++i) {
        const Message& m = At(word, i);
        mix(m.value | uint64_t{m.time} << 32);
        mix(static_cast<uint64_t>(m.width));
        mix_released(m.released);
      }
    }
    for (const Thread& t : state_.threads) {
      mix(t.history);
      mix(t.ended | t.looking << 1 | static_cast<int>(t.at) << 2);
      mix(t.barrier);
      mix_view(t.now);
      mix_view(t.acquired);
      mix_released(t.released);
    }
    for (const Plain& plain : state_.plain) {
      mix(plain.value);
      mix(plain.writer | uint64_t{plain.written} << 32);
    }
    mix_view(state_.reads);
    for (const auto& [at, bytes] : local_) {
      for (size_t i = 0; i < bytes; i += 8) {
        uint64_t value = 0;
        memcpy(&value, at + i, std::min<size_t>(8, bytes - i));
        mix(value);
      }
    }
    return key;
  }

  bool CanRun(const Thread& t) const {
    return !t.ended && t.at != At::kBarrier && !(t.at == At::kCondition && !(*t.ready)());
  }

  // Runs a thread to the end of its step.
  void Run(int thread, const std::vector<Choice>& choices) {
    current_ = thread;
    choices_ = choices;
    position_ = 0;
    dirty_ = waits_ = failed_ = false;
    running_ = true;
    fibers_[thread]->Resume();
    running_ = false;
    ++result_.steps;
  }

  // Goes to the next choices. False if these were the last ones.
  static bool Next(std::vector<Choice>* choices) {
    while (!choices->empty()) {
      if (++choices->back().chosen < choices->back().of) return true;
      choices->pop_back();
    }
    return false;
  }

  // Searches what can follow the present state. Returns the number of interleavings.
  double Visit() {
    Collect();
    const Key key = HashState();
    if (auto it = seen_.find(key); it != seen_.end()) return it->second;
    seen_.emplace(key, 0);  // a circle of waits that fail is no interleaving of its own
    ++result_.states;
    std::vector<int> candidates;
    bool all_ended = true;
    for (size_t i = 0; i < state_.threads.size(); ++i) {
      const Thread& t = state_.threads[i];
      all_ended &= t.ended;
      if (!CanRun(t)) continue;
      if (t.at != At::kLook) {
        candidates = {static_cast<int>(i)};
        break;
      }
      candidates.push_back(static_cast<int>(i));
    }
    if (all_ended) {
      if (on_end_) on_end_();
      return seen_[key] = 1;
    }
    const Snapshot here = Save();
    double interleavings = 0;
    bool moved = false;
    for (int thread : candidates) {
      std::vector<Choice> choices;
      bool clean = false;
      do {
        if (clean) {
          state_.threads[thread] = here.state.threads[thread];
          fibers_[thread]->Restore(here.fibers[thread]);
        } else {
          Restore(here);
        }
        Run(thread, choices);
        choices = choices_;
        path_.push_back({thread, choices});
        if (failed_) return 0;
        clean = waits_ && !dirty_;
        if (!waits_) {
          moved = true;
          interleavings += Visit();
          if (!result_.error.empty()) return 0;
        }
        path_.pop_back();
      } while (Next(&choices));
    }
    if (!moved) {
      result_.error = kEndless;
      return 0;
    }
    return seen_[key] = interleavings;
  }

  std::string Name(size_t word) const {
    return word_name_ ? word_name_(word) : "word " + std::to_string(word);
  }
  static std::string Hex(uint64_t value) {
    char text[20];
    snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(value));
    return text;
  }
  std::string Place(size_t word, int at) const {
    const int after = state_.counts[word] - 1 - at;
    return after == 0 ? "" : ", before " + std::to_string(after) + " that others have stored";
  }
  void Trace(const std::string& what) { result_.trace.push_back(names_[current_] + " " + what); }

  const size_t words_;
  State state_;
  std::vector<std::unique_ptr<Words>> views_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::function<void()>> bodies_;
  std::vector<std::string> names_;
  std::vector<std::pair<char*, size_t>> local_;
  std::function<void()> on_end_;
  std::function<std::string(size_t)> word_name_;
  std::unordered_map<Key, double, HashKey> seen_;
  std::vector<Step> path_;
  Result result_;

  int current_ = 0;
  std::vector<Choice> choices_;
  size_t position_ = 0;
  bool dirty_ = false, waits_ = false, failed_ = false, running_ = false, tracing_ = false;
};

}  // namespace model
