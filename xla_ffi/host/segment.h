// A slab in host memory: private to the process, or a POSIX shared-memory segment.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace jax_intranode {

class SharedMemory {
 public:
  // Zeroed memory. If it is `shared`, a new shared-memory segment (mode 0600) under a unique name.
  // Its pages are allocated, so that a full /dev/shm is an error here and not a fault later.
  static std::unique_ptr<SharedMemory> Allocate(int device, size_t bytes, bool shared);
  // Maps another process's segment.
  static std::unique_ptr<SharedMemory> Open(int device, const std::string& name, size_t bytes);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Removes the name. Called as soon as all processes have mapped the segment, so that a crash
  // leaves nothing behind. If a crash comes before that, the next segment's creator removes it.
  void Unlink();

  char* address() const { return address_; }
  size_t bytes() const { return bytes_; }
  const std::string& Handle() const { return name_; }
  char* records() const { return nullptr; }  // handlers of CPU devices return their errors

 private:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {}
  // Does not close `fd`.
  void Map(int fd);

  char* address_ = nullptr;
  size_t bytes_;
  std::string name_;
  int fd_ = -1;  // open and locked as long as the name exists
};

}  // namespace jax_intranode
