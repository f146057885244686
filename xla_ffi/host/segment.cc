#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <random>
#include <system_error>

namespace jax_intranode {
namespace {

[[noreturn]] void Throw(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), "jax_intranode: " + what);
}

std::string FreshName() {
  static std::atomic<unsigned> count{0};
  std::random_device random;
  const unsigned long long noise =
      (static_cast<unsigned long long>(random()) << 32) | static_cast<unsigned long long>(random());
  char name[80];
  snprintf(name, sizeof(name), "/jax_intranode.%d.%u.%016llx", static_cast<int>(getpid()), count++,
           noise);
  return name;
}

}  // namespace

std::unique_ptr<Segment> Segment::Private(size_t bytes) { return Map(-1, bytes, ""); }

std::unique_ptr<Segment> Segment::Create(size_t bytes) {
  std::string name = FreshName();
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) Throw(errno, "creating the shared-memory segment " + name);
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    close(fd);
    shm_unlink(name.c_str());
    Throw(error, "reserving " + std::to_string(bytes) +
                     " bytes of shared memory (/dev/shm may be full; JAX_INTRANODE_SLAB_MIB sets "
                     "the size)");
  }
  std::unique_ptr<Segment> segment = Map(fd, bytes, name);
  segment->linked_ = true;
  return segment;
}

std::unique_ptr<Segment> Segment::Open(const std::string& name, size_t bytes) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) Throw(errno, "opening the shared-memory segment " + name);
  return Map(fd, bytes, name);
}

std::unique_ptr<Segment> Segment::Map(int fd, size_t bytes, std::string name) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  const int error = errno;
  if (fd >= 0) close(fd);
  if (address == MAP_FAILED) Throw(error, "mapping " + std::to_string(bytes) + " bytes " + name);
  return std::unique_ptr<Segment>(new Segment(static_cast<char*>(address), bytes, std::move(name)));
}

Segment::~Segment() {
  Unlink();
  munmap(address_, bytes_);
}

void Segment::Unlink() {
  if (linked_) shm_unlink(name_.c_str());
  linked_ = false;
}

}  // namespace jax_intranode
