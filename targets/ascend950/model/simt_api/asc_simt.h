// Threads, barriers and shuffles of SIMT vector functions.
#pragma once
#include "tw_simt.h"
