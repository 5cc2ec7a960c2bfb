// Number types and conversions of SIMT vector functions.
#pragma once
#include "tw_types.h"
