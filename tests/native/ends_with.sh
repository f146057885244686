#!/usr/bin/env bash
# Passes if a program ends with a status and prints a pattern, in one of three runs: a fault of threads
# shows only where they overtake each other. ThreadSanitizer, which ends a program with 66, may find the
# fault first.
#
#   ends_with.sh STATUS PATTERN PROGRAM [ARGUMENT...]
set -euo pipefail
expected=$1 pattern=$2
shift 2
for _ in 1 2 3; do
  status=0
  output=$("./$@" 2>&1) || status=$?
  if [ "$status" -eq "$expected" ]; then break; fi
done
echo "exit status $status: $output"
if [ "$status" -eq 66 ] && [[ $output == *"ThreadSanitizer: data race"* ]]; then exit; fi
[ "$status" -eq "$expected" ] && grep -qE "$pattern" <<<"$output" && [[ $output != *"busy 1"* ]]
