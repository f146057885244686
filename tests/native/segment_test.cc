// A segment of shared memory is reserved while signals arrive, on versions of Linux where one ends
// the reservation.
#include "xla_ffi/host/segment.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace jin = jax_intranode;

namespace {

volatile sig_atomic_t signals = 0;

void Check(bool holds, const char* what) {
  if (holds) return;
  printf("%s\n", what);
  std::exit(1);
}

}  // namespace

// Takes the place of the C library's function. A signal arrives during each call.
extern "C" int posix_fallocate(int fd, off_t, off_t bytes) {
  const int before = signals;
  raise(SIGALRM);
  return signals != before ? EINTR : ftruncate(fd, bytes);
}

int main() {
  struct sigaction action{};
  action.sa_handler = [](int) { signals = signals + 1; };
  sigaction(SIGALRM, &action, nullptr);
  const auto segment = jin::SharedMemory::Allocate(0, 1 << 20, true);
  Check(signals == 1, "the signal is lost");
  segment->address()[segment->bytes() - 1] = 1;
  raise(SIGALRM);
  Check(signals == 2, "later signals are not taken");
  printf("done\n");
}
