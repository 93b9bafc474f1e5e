// SPDX-License-Identifier: Apache-2.0
// Visibility of symbols: sources without Paddle are compiled with hidden visibility, so a library exports only what is
// marked here.
#pragma once

#define FD_PUBLIC __attribute__((visibility("default")))
#define FD_EXPORT extern "C" FD_PUBLIC
