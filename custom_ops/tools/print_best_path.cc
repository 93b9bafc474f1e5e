// SPDX-License-Identifier: Apache-2.0
// Prints the instruction-set path that a library with all paths would run on this machine. setup.py runs it when
// FD_BUILD_PATHS=native.
#include <cstdio>

#include "common/isa.h"

int main() { std::puts(fd::isa_name(fd::current_isa())); }
