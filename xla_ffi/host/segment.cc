#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace jax_intranode {
namespace {

constexpr char kPrefix[] = "jax_intranode.";

[[noreturn]] void Throw(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), "jax_intranode: " + what);
}

std::string FreshName() {
  static std::atomic<unsigned> count{0};
  unsigned long long noise = 0;
  // Not std::random_device, which calls a function that only the newest C libraries have.
  if (getrandom(&noise, sizeof(noise), 0) < 0) Throw(errno, "getting random bytes");
  char name[80];
  snprintf(name, sizeof(name), "/%s%d.%u.%016llx", kPrefix, static_cast<int>(getpid()), count++,
           noise);
  return name;
}

// Removes the segments that crashed processes left behind. The creator of a segment keeps it locked
// until its name is gone, and the system unlocks the files of a process that ends. Files of others
// stay, also where this process may open them, as root.
void RemoveAbandoned() {
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.rfind(kPrefix, 0) != 0) continue;
    const int fd = shm_open(("/" + name).c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) continue;  // another user's, or gone
    struct stat status;
    const bool ours =
        fstat(fd, &status) == 0 && status.st_uid == geteuid() && S_ISREG(status.st_mode);
    if (ours && flock(fd, LOCK_EX | LOCK_NB) == 0) shm_unlink(("/" + name).c_str());
    close(fd);
  }
  closedir(directory);
}

// A new locked file; its name is in `name`.
int CreateLocked(std::string* name) {
  for (;;) {
    *name = FreshName();
    const int fd = shm_open(name->c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) Throw(errno, "creating the shared-memory segment " + *name);
    struct stat status;
    const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
    const int error = locked || errno == EWOULDBLOCK ? 0 : errno;
    if (locked && fstat(fd, &status) == 0 && status.st_nlink > 0) return fd;
    close(fd);
    shm_unlink(name->c_str());
    if (error != 0) Throw(error, "locking the shared-memory segment " + *name);
    // Another process removed it as abandoned before it was locked.
  }
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::Allocate(int, size_t bytes, bool shared) {
  if (!shared) return Map(-1, bytes, "");
  RemoveAbandoned();
  std::string name;
  const int fd = CreateLocked(&name);
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    shm_unlink(name.c_str());
    close(fd);
    Throw(error, "reserving " + std::to_string(bytes) +
                     " bytes of shared memory (/dev/shm may be full; JAX_INTRANODE_SLAB_MIB sets "
                     "the size)");
  }
  std::unique_ptr<SharedMemory> segment;
  try {
    segment = Map(fd, bytes, name);
  } catch (...) {
    shm_unlink(name.c_str());
    close(fd);
    throw;
  }
  segment->fd_ = fd;
  return segment;
}

// A peer has sent the name. A segment that is too small would end the process at an access.
std::unique_ptr<SharedMemory> SharedMemory::Open(int, const std::string& name, size_t bytes) {
  if (name.rfind(std::string("/") + kPrefix, 0) != 0 || name.find('\0') != std::string::npos) {
    Throw(EINVAL, "a peer has sent a name of a shared-memory segment that is not ours");
  }
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) Throw(errno, "opening the shared-memory segment " + name);
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_uid != geteuid() ||
      status.st_size < static_cast<off_t>(bytes)) {
    close(fd);
    Throw(EINVAL, "the shared-memory segment " + name + " is not this user's, or has fewer than " +
                      std::to_string(bytes) + " bytes");
  }
  std::unique_ptr<SharedMemory> segment;
  try {
    segment = Map(fd, bytes, name);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return segment;
}

std::unique_ptr<SharedMemory> SharedMemory::Map(int fd, size_t bytes, std::string name) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) Throw(errno, "mapping " + std::to_string(bytes) + " bytes " + name);
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(static_cast<char*>(address), bytes, std::move(name)));
}

SharedMemory::~SharedMemory() {
  Unlink();
  munmap(address_, bytes_);
}

void SharedMemory::Unlink() {
  if (fd_ < 0) return;
  shm_unlink(name_.c_str());
  close(fd_);
  fd_ = -1;
}

}  // namespace jax_intranode
