// What the programs of the models share: variants, arguments, and the totals of all searches.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "machine.h"

namespace model {

// A way to break the code, which the variant of this name takes.
class Flag {
 public:
  explicit Flag(const char* variant) : variant_(variant) { All().push_back(this); }
  Flag(const Flag&) = delete;
  operator bool() const { return set_; }  // NOLINT: used like a bool

  // Returns whether there is such a variant.
  static bool Set(const std::string& variant) {
    bool known = variant == "sound";
    for (Flag* flag : All()) known |= flag->set_ = variant == flag->variant_;
    return known;
  }

 private:
  static std::vector<Flag*>& All() {
    static std::vector<Flag*> all;
    return all;
  }

  const char* const variant_;
  bool set_ = false;
};

// Arguments of a model: [variant] [ranks] [operations] [more], and what its searches have found.
class Totals {
 public:
  Totals(int argc, char** argv, int operations)
      : variant(argc > 1 ? argv[1] : "sound"),
        ranks(argc > 2 ? atoi(argv[2]) : 2),
        operations(argc > 3 ? atoi(argv[3]) : operations),
        more(argc > 4 ? argv[4] : "") {}

  const std::string variant;
  const int ranks, operations;
  const std::string more;

  // Breaks what the variant breaks. Whether a model can run with these arguments; prints why not.
  bool Fit(int most_ranks, int most_operations) const {
    const bool fit = Flag::Set(variant) && ranks >= 2 && ranks <= most_ranks && operations >= 1 &&
                     operations <= most_operations;
    if (!fit) printf("unknown variant, not 2 to %d ranks, or too many operations\n", most_ranks);
    return fit;
  }

  // Adds a search. Prints what is wrong, and where. Returns whether anything is.
  bool IsWrong(const Machine::Result& result, const std::string& where) {
    ++sequences_;
    states_ += result.states;
    steps_ += result.steps;
    interleavings_ += result.interleavings;
    if (result.error.empty()) return false;
    printf("%s\n%s\n", result.error.c_str(), where.c_str());
    for (const std::string& line : result.trace) printf("  %s\n", line.c_str());
    printf("%s: ranks %d operations %d ends wrong, after %zu states\n", variant.c_str(), ranks,
           operations, states_);
    return true;
  }

  void Print() const {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began_;
    printf(
        "%s: ranks %d operations %d wrong 0 sequences %zu states %zu steps %zu "
        "interleavings %.3g, %.1f s\n",
        variant.c_str(), ranks, operations, sequences_, states_, steps_, interleavings_,
        seconds.count());
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  size_t sequences_ = 0, states_ = 0, steps_ = 0;
  double interleavings_ = 0;
};

}  // namespace model
