// A slab in host memory: private to the process, or a POSIX shared-memory segment.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace jax_intranode {

class Segment {
 public:
  // Zeroed memory of this process alone.
  static std::unique_ptr<Segment> Private(size_t bytes);
  // A new shared-memory segment (mode 0600, zeroed) under a unique name. Its pages are allocated,
  // so that a full /dev/shm is an error here and not a fault later.
  static std::unique_ptr<Segment> Create(size_t bytes);
  // Maps another process's segment.
  static std::unique_ptr<Segment> Open(const std::string& name, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Removes the name. Called as soon as all processes have mapped the segment, so that a crash
  // leaves nothing behind. If a crash comes before that, the next Create() removes the name.
  void Unlink();

  char* address() const { return address_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment(char* address, size_t bytes, std::string name)
      : address_(address), bytes_(bytes), name_(std::move(name)) {}
  // Does not close `fd`.
  static std::unique_ptr<Segment> Map(int fd, size_t bytes, std::string name);

  char* address_;
  size_t bytes_;
  std::string name_;
  int fd_ = -1;  // open and locked as long as the name exists
};

}  // namespace jax_intranode
