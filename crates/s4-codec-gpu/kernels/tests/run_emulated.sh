#!/bin/sh
# Builds the kernels for the host with the emulator and compares them with the reference.
# Needs a C++17 compiler; $CXX names it. No GPU and no CUDA toolkit.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra -Wno-unknown-pragmas -Wno-parentheses \
  -fsanitize=address,undefined -fno-sanitize-recover=undefined -x c++ "$here/emulated.cpp" -o "$out/emulated"
ASAN_OPTIONS=detect_stack_use_after_return=0:detect_leaks=0 "$out/emulated"
