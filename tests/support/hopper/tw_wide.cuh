#include "tw_hopper.cuh"
