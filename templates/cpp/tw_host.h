// What a generated kernel needs of its host: an entry point, argument checks and a parallel loop.
//
//   TW_KERNEL(scale) {
//     TW_ARGUMENTS(3);
//     TW_TENSOR(y, 0, kDLFloat, 32, 2);
//     TW_TENSOR(x, 1, kDLFloat, 32, 2);
//     TW_INT(num_rows, 2, 0, 4096);
//     TW_EXTENT(x, 0, num_rows);
//     TW_EXTENT(x, 1, 576);
//     ...
//     tw_parallel(num_rows, scale_rows, &arguments);
//     return 0;
//   }
#pragma once
#include <stdint.h>

#include "tw_arguments.h"

// Work on items begin <= i < end. thread_id < tw_num_threads() is unique among the calls in flight.
typedef void (*tw_body)(void* arg, int64_t begin, int64_t end, int thread_id);

// Calls body on ranges that cover 0 <= i < num_items, each item once, in no fixed order: items
// must be independent, so that bits do not depend on who ran them. Returns when all are done.
// Runs in the calling thread where no pool is bound, for one item, and inside another body. An
// item should be worth some microseconds; a kernel with less work than that passes one item.
TW_HIDDEN void tw_parallel(int64_t num_items, tw_body body, void* arg);

// Threads that may run a body: the size of the bound pool, or 1.
TW_HIDDEN int tw_num_threads(void);

// The tensor's elements.
#define TW_DATA(type, name) (static_cast<type*>((name)->data))
