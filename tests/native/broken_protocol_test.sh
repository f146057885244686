#!/usr/bin/env bash
# Passes if a test program finds that a variant of the protocol is broken, in one of the given ways.
#
#   broken_protocol_test.sh PROGRAM VARIANT RANKS WAYS...
#
# WAYS: "waits" (a wait without end), "is_wrong" (a wrong result), "ends_wrong" (a model ends in
# either).
set -euo pipefail
program=$PWD/$1 variant=$2 ranks=$3
shift 3

# Variants that should not wait for ever get more time, so that a slow machine passes.
patience=10
if [[ "$*" == *waits* ]]; then patience=1; fi
arguments=(300 "$patience")
if [[ "$*" == *ends_wrong* ]]; then arguments=(3 full); fi
status=0
output=$("$program" "$variant" "$ranks" "${arguments[@]}") || status=$?
echo "exit status $status: $output"
[ "$status" -eq 1 ]
if [[ $output == *"busy 1"* ]]; then exit 1; fi
for way in "$@"; do
  case $way in
    waits) expected="a wait without end" ;;
    is_wrong) expected="^$variant: ranks $ranks .* wrong [1-9]" ;;
    ends_wrong) expected="^$variant: ranks $ranks .* ends wrong" ;;
  esac
  if grep -q "$expected" <<<"$output"; then exit 0; fi
done
echo "expected: $*"
exit 1
