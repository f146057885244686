#!/usr/bin/env bash
# Passes if a program ends with a status and prints a pattern, in one of three runs: a fault of threads
# shows only where they overtake each other.
#
#   ends_with.sh STATUS[|STATUS] PATTERN PROGRAM [ARGUMENT...]
set -euo pipefail
expected=$1 pattern=$2
shift 2
for _ in 1 2 3; do
  status=0
  output=$("./$@" 2>&1) || status=$?
  if [[ "|$expected|" == *"|$status|"* ]]; then break; fi
done
echo "exit status $status: $output"
[[ "|$expected|" == *"|$status|"* ]] && grep -qE "$pattern" <<<"$output" && [[ $output != *"busy 1"* ]]
