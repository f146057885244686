// The texts of messages.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace jax_intranode {

// The parts one after another: numbers, enumerators by their number, and what a string can take.
template <class... Parts>
std::string Join(const Parts&... parts) {
  const auto text = []<class Part>(const Part& part) {
    if constexpr (std::is_enum_v<Part>) {
      return std::to_string(static_cast<int>(part));
    } else if constexpr (std::is_arithmetic_v<Part>) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  return (text(parts) + ...);
}

// Errors of this package with a text of these parts.
template <class... Parts>
std::runtime_error RuntimeError(const Parts&... parts) {
  return std::runtime_error(Join("jax_intranode: ", parts...));
}
template <class... Parts>
std::invalid_argument InvalidArgument(const Parts&... parts) {
  return std::invalid_argument(Join("jax_intranode: ", parts...));
}

}  // namespace jax_intranode
