// The connections between the processes of a mesh on one host.
//
// Each pair of processes has a Unix socket. Nobody trusts an address: the process that connects and
// the one that accepts both check that the other has the same user (SO_PEERCRED) and knows the
// secret, which travelled through JAX's key-value store. The address is in the abstract namespace:
// it is no file that a crash could leave behind, and it is random, so nobody can take it in
// advance.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace jax_intranode {

// A file descriptor that is closed with its owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { Reset(); }
  void Reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct PeerAddress {
  int process;
  std::string address;
  std::vector<int64_t> device_ids;
};

struct Connection {
  int process;
  int pid;            // as this process sees it, or else as the peer says
  bool pid_is_known;  // visible here, so that /proc tells of it
  std::vector<int64_t> device_ids;
  Fd socket;
};

class PeerSocket {
 public:
  // Listens at a new address. `process` is the number of this process. Throws std::runtime_error.
  explicit PeerSocket(int process);

  const std::string& address() const { return address_; }

  // Connects with all peers, which do the same at the same time. Throws std::runtime_error with
  // the reason if a peer can't be reached. `secret` has 32 bytes. To be called once.
  std::vector<Connection> Connect(const std::vector<PeerAddress>& peers, const std::string& secret,
                                  double timeout_s);

 private:
  const int process_;
  std::string address_;
  Fd listener_;
};

// Whether a process that was there is gone, or ends: the kernel's flag PF_EXITING of its first
// thread.
bool HasEnded(int pid);

}  // namespace jax_intranode
