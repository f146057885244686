// Threads of a program as fibers, whose state can be saved and restored.
#pragma once

#undef _FORTIFY_SOURCE  // its check of longjmp refuses jumps between stacks

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace model {

// A stack on which a thread of the program runs. It can be saved and restored, so what lies on it
// must not own memory.
class Fiber {
 public:
  struct Saved {
    jmp_buf registers;
    std::vector<char> stack;
  };

  // Replaces what the fiber runs. It begins at the next Resume().
  void Start(std::function<void()> body) {
    body_ = std::move(body);
    stack_.resize(kStackBytes);
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.data();
    context_.uc_stack.ss_size = stack_.size();
    context_.uc_link = nullptr;
    makecontext(&context_, &Fiber::Enter, 0);
    Running() = this;
    if (_setjmp(Caller()) == 0) setcontext(&context_);
  }

  // Runs until the next Yield().
  void Resume() {
    Running() = this;
    if (_setjmp(Caller()) == 0) _longjmp(here_, 1);
  }

  // Returns to the caller of Resume().
  static void Yield() {
    Fiber* const fiber = Running();
    char mark;
    fiber->low_ = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(&mark) - kMargin);
    if (_setjmp(fiber->here_) == 0) _longjmp(Caller(), 1);
  }

  void Save(Saved* to) const {
    memcpy(&to->registers, &here_, sizeof here_);
    to->stack.assign(const_cast<const char*>(low_), stack_.data() + stack_.size());
  }
  void Restore(const Saved& from) {
    memcpy(&here_, &from.registers, sizeof here_);
    low_ = stack_.data() + stack_.size() - from.stack.size();
    memcpy(low_, from.stack.data(), from.stack.size());
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  static constexpr size_t kMargin = 512;  // for the frames of Yield and what it calls

  static Fiber*& Running() {
    static Fiber* running;
    return running;
  }
  static jmp_buf& Caller() {
    static jmp_buf caller;
    return caller;
  }
  static void Enter() {
    Yield();
    Running()->body_();
    for (;;) Yield();
  }

  std::function<void()> body_;
  std::vector<char> stack_;
  char* low_ = nullptr;
  jmp_buf here_;
  ucontext_t context_;
};

}  // namespace model
