// The calls of the core's scalar program, and of SIMD vector functions.
#pragma once
#include "tw_calls.h"
#include "tw_simd.h"
