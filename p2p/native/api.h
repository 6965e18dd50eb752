// What every exported function carries: C linkage and visibility from outside the library.
#pragma once
#define P2P_API extern "C" __attribute__((visibility("default")))
