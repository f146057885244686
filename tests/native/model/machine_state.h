// What a checker of protocols (machine.h) knows of a program at one point of the search.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "fiber.h"

namespace model {

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
  uint64_t history = 1, before_look = 1;
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

}  // namespace model
