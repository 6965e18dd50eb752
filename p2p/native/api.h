// What every exported function carries: C linkage and visibility from outside the library.
#pragma once
#define P2P_API extern "C" __attribute__((visibility("default")))

// Python declares functions and structures by the headers that lie beside it, and refuses a library of others.
#ifdef P2P_HEADERS
#define P2P_BUILT_FROM(function) \
    P2P_API const char* function() { return P2P_HEADERS; }
#else
#define P2P_BUILT_FROM(function)
#endif

// Closes the body, a function-try-block, of every exported function that allocates or starts threads: an exception that
// reached C or Python would end the process. What is left of it is the value given, which stands for out of memory.
#define P2P_CATCH(...) \
    catch (...) { return __VA_ARGS__; }

enum { P2P_E_MEMORY = -40 };  // where a function of p2p returns a code
