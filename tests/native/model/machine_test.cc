// Tests the checker itself (machine.h) with small programs whose possible outcomes are known: the
// litmus tests of the literature on memory models. Each must have the same outcomes with and
// without the interleavings that the search leaves out.
#include "machine.h"
//
#include <set>

using model::Machine;
using model::Order;

namespace {

constexpr size_t kX = 0, kY = 1, kPair = 2, kWords = 4;
constexpr auto kRelaxed = Order::kRelaxed;

struct Registers {
  uint64_t r[4];
};
Registers registers;

using Thread = std::function<void(Machine&)>;
using Outcomes = std::set<std::string>;

struct Litmus {
  const char* name;
  std::vector<Thread> threads;
  Outcomes expected;    // the registers, or the error
  bool finals = false;  // the outcome is the last values of x and y
};

// A register's value at the end of a program.
uint64_t& R(int i) { return registers.r[i]; }

Outcomes OutcomesOf(const Litmus& test, bool every_access) {
  Machine machine(kWords, 0, 1, {every_access});
  memset(&registers, 0, sizeof registers);
  machine.AddLocalMemory(&registers, sizeof registers);
  Outcomes outcomes;
  for (const Thread& body : test.threads) {
    machine.AddThread("thread", [&machine, &body] { body(machine); });
  }
  machine.OnEnd([&] {
    std::string outcome;
    const auto add = [&](uint64_t value) {
      outcome += (outcome.empty() ? "" : " ") + std::to_string(value);
    };
    if (test.finals) {
      add(machine.Newest(kX));
      add(machine.Newest(kY));
    } else {
      for (uint64_t r : registers.r) add(r);
    }
    outcomes.insert(outcome);
  });
  const auto result = machine.Search();
  if (!result.error.empty()) return {result.error};
  return outcomes;
}

// All outcomes of registers with values below 2, except some.
Outcomes AllBut(int used, const Outcomes& forbidden) {
  Outcomes all;
  for (int bits = 0; bits < 1 << used; ++bits) {
    std::string outcome;
    for (int i = 0; i < 4; ++i) {
      outcome += (i == 0 ? "" : " ") + std::to_string(i < used ? bits >> i & 1 : 0);
    }
    if (!forbidden.contains(outcome)) all.insert(outcome);
  }
  return all;
}

Thread Send(bool fence, Order order = kRelaxed) {
  return [=](Machine& m) {
    m.Store(kX, 1, kRelaxed);
    if (fence) m.ReleaseFence();
    m.Store(kY, 1, order);
  };
}
Thread Receive(bool fence, Order order = kRelaxed) {
  return [=](Machine& m) {
    R(0) = m.Load(kY, order);
    if (fence) m.AcquireFence();
    R(1) = m.Load(kX, kRelaxed);
  };
}
Thread StoreThenLoad(size_t to, size_t from, int r) {
  return [=](Machine& m) {
    m.Store(to, 1, kRelaxed);
    m.Fence();
    R(r) = m.Load(from, kRelaxed);
  };
}
Thread LoadThenStore(size_t from, size_t to, int r) {
  return [=](Machine& m) {
    R(r) = m.Load(from, kRelaxed);
    m.Store(to, 1, kRelaxed);
  };
}
Thread StoreOne(size_t to) {
  return [=](Machine& m) { m.Store(to, 1, kRelaxed); };
}
Thread LoadBoth(size_t first, size_t second, int r, bool fence) {
  return [=](Machine& m) {
    R(r) = m.Load(first, kRelaxed);
    if (fence) m.AcquireFence();
    R(r + 1) = m.Load(second, kRelaxed);
  };
}
Thread StoreBoth(size_t first, size_t second) {
  return [=](Machine& m) {
    m.Store(first, 1, kRelaxed);
    m.Store(second, 2, kRelaxed);
  };
}
Thread AwaitThenLoad(Order order) {
  return [=](Machine& m) {
    while (m.Load(kY, order) == 0) m.Wait();
    m.Store(kPair, 1, kRelaxed);
    R(0) = m.Load(kX, kRelaxed);
  };
}
Thread PlainSend(Order order) {
  return [=](Machine& m) {
    m.Write(0, 7);
    m.Store(kY, 1, order);
  };
}
Thread PlainReceive(Order order) {
  return [=](Machine& m) {
    while (m.Load(kY, order) == 0) m.Wait();
    R(0) = m.Read(0);
  };
}

}  // namespace

int main() {
  const Litmus tests[] = {
      {"message passing", {Send(false), Receive(false)}, AllBut(2, {})},
      {"with both fences", {Send(true), Receive(true)}, AllBut(2, {"1 0 0 0"})},
      {"with one fence", {Send(true), Receive(false)}, AllBut(2, {})},
      {"with the other fence", {Send(false), Receive(true)}, AllBut(2, {})},
      {"release and acquire",
       {Send(false, Order::kRelease), Receive(false, Order::kAcquire)},
       AllBut(2, {"1 0 0 0"})},
      {"release, fence", {Send(false, Order::kRelease), Receive(true)}, AllBut(2, {"1 0 0 0"})},
      {"store buffering", {StoreThenLoad(kX, kY, 0), StoreThenLoad(kY, kX, 1)}, AllBut(2, {})},
      // The memory model leaves out that both see the other's later store.
      {"load buffering",
       {LoadThenStore(kX, kY, 0), LoadThenStore(kY, kX, 1)},
       AllBut(2, {"1 1 0 0"})},
      {"coherence of loads",
       {[](Machine& m) {
          m.Store(kX, 1, kRelaxed);
          m.Store(kX, 2, kRelaxed);
        },
        LoadBoth(kX, kX, 0, false)},
       {"0 0 0 0", "0 1 0 0", "0 2 0 0", "1 1 0 0", "1 2 0 0", "2 2 0 0"}},
      {"independent loads",
       {StoreOne(kX), StoreOne(kY), LoadBoth(kX, kY, 0, true), LoadBoth(kY, kX, 2, true)},
       AllBut(4, {})},
      {"write to read causality",
       {StoreOne(kX),
        [](Machine& m) {
          R(0) = m.Load(kX, kRelaxed);
          m.Fence();
          if (R(0) == 1) m.Store(kY, 1, kRelaxed);
        },
        LoadBoth(kY, kX, 1, true)},
       AllBut(3, {"1 1 0 0", "0 1 0 0", "0 1 1 0"})},
      {"two writers", {StoreBoth(kX, kY), StoreBoth(kY, kX)}, {"1 1", "1 2", "2 1", "2 2"}, true},
      {"pairs are whole",
       {[](Machine& m) { m.StorePair(kPair, 1 | uint64_t{1} << 32); },
        [](Machine& m) { m.StorePair(kPair, 2 | uint64_t{2} << 32); },
        [](Machine& m) {
          const uint64_t pair = m.LoadPair(kPair);
          R(0) = pair & 15;
          R(1) = pair >> 32;
        }},
       {"0 0 0 0", "1 1 0 0", "2 2 0 0"}},
      {"pairs and words",
       {[](Machine& m) { m.StorePair(kPair, 1 | uint64_t{1} << 32); },
        [](Machine& m) { R(0) = m.Load(kPair, kRelaxed); }},
       {"wrong: accesses of 32 and 64 bits race"}},
      {"a wait", {Send(false), AwaitThenLoad(kRelaxed)}, {"0 0 0 0", "1 0 0 0"}},
      {"a wait that acquires",
       {Send(false, Order::kRelease), AwaitThenLoad(Order::kAcquire)},
       {"1 0 0 0"}},
      {"a wait without end", {StoreOne(kX), AwaitThenLoad(kRelaxed)}, {Machine::kEndless}},
      {"plain data", {PlainSend(Order::kRelease), PlainReceive(Order::kAcquire)}, {"7 0 0 0"}},
      {"a race",
       {PlainSend(kRelaxed), PlainReceive(kRelaxed)},
       {"wrong: a load races with a store"}},
  };
  int failed = 0;
  for (const Litmus& test : tests) {
    for (const bool every_access : {false, true}) {
      const Outcomes outcomes = OutcomesOf(test, every_access);
      if (outcomes == test.expected) continue;
      ++failed;
      printf("%s%s:\n", test.name, every_access ? " (every access)" : "");
      for (const std::string& outcome : outcomes) printf("  %s\n", outcome.c_str());
      printf(" expected:\n");
      for (const std::string& outcome : test.expected) printf("  %s\n", outcome.c_str());
    }
  }
  printf(failed == 0 ? "done\n" : "failed\n");
  return failed != 0;
}
