#include "exit_message.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

namespace jax_intranode {
namespace {

struct ExitMessage {
  std::mutex mutex;
  std::string text;
  bool always = false;
  pid_t process = 0;  // a forked child prints nothing
};

// Never destroyed: it is needed last.
ExitMessage& Get() {
  static ExitMessage& message = *new ExitMessage;
  return message;
}

std::atomic<int> exit_status{0};

#ifdef __GLIBC__
const int registered = on_exit([](int status, void*) { exit_status = status; }, nullptr);
#else
#error "the exit status is known by on_exit, which only glibc has"
#endif

__attribute__((destructor)) void PrintAtExit() {
  ExitMessage& message = Get();
  // A thread that hangs at the end of the process may hold the lock.
  const std::unique_lock lock(message.mutex, std::try_to_lock);
  if (!lock || (exit_status == 0 && !message.always)) return;
  if (message.text.empty() || message.process != getpid()) return;
  const std::string line = "\n" + message.text + "\n";
  for (size_t written = 0; written < line.size();) {
    const ssize_t count = write(STDERR_FILENO, line.data() + written, line.size() - written);
    if (count <= 0) return;
    written += static_cast<size_t>(count);
  }
}

// Of the C++ library that XLA uses. A wheel of this package may have another one inside.
using TerminateHandler = void (*)();
TerminateHandler former_handler = nullptr;
// std::current_exception(). The destructor makes functions return it as they do its type.
struct ExceptionPointer {
  ~ExceptionPointer() {}
  void* exception = nullptr;
};
ExceptionPointer (*current_exception)() = nullptr;

// Whether an exception has ended this thread. It is none if the thread's stack is unwound because
// the thread is to end. __cxa_current_exception_type does not tell: if a handler of Clang's has
// caught the unwinding, it reads a type from memory that has none.
bool HasException() { return current_exception != nullptr && current_exception().exception; }

void OnTerminate() {
  if (!HasException() && syscall(SYS_gettid) != getpid()) {
    for (;;) pause();
  }
  if (former_handler != nullptr) former_handler();
  abort();
}

}  // namespace

void BeginExit() {
  void* const library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return;
  const auto set_terminate = reinterpret_cast<TerminateHandler (*)(TerminateHandler)>(
      dlsym(library, "_ZSt13set_terminatePFvvE"));
  current_exception =
      reinterpret_cast<ExceptionPointer (*)()>(dlsym(library, "_ZSt17current_exceptionv"));
  if (set_terminate == nullptr) return;
  const TerminateHandler former = set_terminate(&OnTerminate);
  if (former != &OnTerminate) former_handler = former;
}

void SetExitMessage(const std::string& message, bool always) {
  ExitMessage& mine = Get();
  std::lock_guard lock(mine.mutex);
  mine.text = message;
  mine.always = always;
  mine.process = getpid();
}

}  // namespace jax_intranode
