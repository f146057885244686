#include "exit_message.h"

#include <stdlib.h>
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
  if (!message.mutex.try_lock()) return;
  const bool wanted = exit_status != 0 || message.always;
  message.mutex.unlock();
  if (wanted) PrintExitMessage();
}

}  // namespace

void SetExitMessage(const std::string& message, bool always) {
  ExitMessage& mine = Get();
  std::lock_guard lock(mine.mutex);
  mine.text = message;
  mine.always = always;
  mine.process = getpid();
}

void PrintExitMessage() {
  ExitMessage& message = Get();
  std::lock_guard lock(message.mutex);
  if (message.text.empty() || message.process != getpid()) return;
  const std::string line = "\n" + message.text + "\n";
  message.text.clear();
  for (size_t written = 0; written < line.size();) {
    const ssize_t count = write(STDERR_FILENO, line.data() + written, line.size() - written);
    if (count <= 0) return;
    written += static_cast<size_t>(count);
  }
}

}  // namespace jax_intranode
