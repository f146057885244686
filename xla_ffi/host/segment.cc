#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
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

bool IsOwn(const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

// Opens a file of this user; -1 and errno if there is none. Another user's file is not opened, also
// where this process may, as root: that would wait as long as he has a lease on it.
int OpenOwn(const std::string& name, struct stat* status) {
  errno = EPERM;
  if (lstat(("/dev/shm" + name).c_str(), status) == 0 && !IsOwn(*status)) return -1;
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK, 0);
  // The name may have changed hands.
  if (fd < 0 || (fstat(fd, status) == 0 && IsOwn(*status))) return fd;
  close(fd);
  errno = EPERM;
  return -1;
}

// Removes the segments that crashed processes left behind. The creator of a segment keeps it locked
// until its name is gone, and the system unlocks the files of a process that ends. Files of others
// stay.
void RemoveAbandoned() {
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.rfind(kPrefix, 0) != 0) continue;
    struct stat status;
    const int fd = OpenOwn("/" + name, &status);
    if (fd < 0) continue;  // another user's, or gone
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) shm_unlink(("/" + name).c_str());
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

// Reserves the pages of a file, without signals meanwhile: older versions of Linux give up at any.
int Reserve(int fd, size_t bytes) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::Allocate(int, size_t bytes, bool shared) {
  std::unique_ptr<SharedMemory> memory(new SharedMemory(bytes));
  if (shared) {
    RemoveAbandoned();
    memory->fd_ = CreateLocked(&memory->name_);
    if (const int error = Reserve(memory->fd_, bytes); error != 0) {
      Throw(error, "reserving " + std::to_string(bytes) +
                       " bytes of shared memory (/dev/shm may be full; JAX_INTRANODE_SLAB_MIB sets "
                       "the size)");
    }
  }
  memory->Map(memory->fd_);
  return memory;
}

// A peer has sent the name. A segment that is too small would end the process at an access.
std::unique_ptr<SharedMemory> SharedMemory::Open(int, const std::string& name, size_t bytes) {
  if (name.rfind(std::string("/") + kPrefix, 0) != 0 || name.find('\0') != std::string::npos) {
    Throw(EINVAL, "a peer has sent a name of a shared-memory segment that is not ours");
  }
  struct stat status;
  const int fd = OpenOwn(name, &status);
  if (fd < 0) Throw(errno, "opening the segment " + name + ", which must be this user's");
  if (status.st_size < static_cast<off_t>(bytes)) {
    close(fd);
    Throw(EINVAL, "the shared-memory segment " + name + " has fewer than " + std::to_string(bytes) +
                      " bytes");
  }
  std::unique_ptr<SharedMemory> memory(new SharedMemory(bytes));
  memory->name_ = name;
  try {
    memory->Map(fd);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return memory;
}

void SharedMemory::Map(int fd) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) Throw(errno, "mapping " + std::to_string(bytes_) + " bytes " + name_);
  address_ = static_cast<char*>(address);
}

SharedMemory::~SharedMemory() {
  Unlink();
  if (address_ != nullptr) munmap(address_, bytes_);
}

void SharedMemory::Unlink() {
  if (fd_ < 0) return;
  shm_unlink(name_.c_str());
  close(fd_);
  fd_ = -1;
}

}  // namespace jax_intranode
