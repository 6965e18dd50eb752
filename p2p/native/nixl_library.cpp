#include "p2p/native/nixl_library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace p2p::nixl {

namespace {

std::mutex loading;
std::mutex choosing;
Functions table;
const Functions* loaded = nullptr;

// The environment keeps these very bytes, and they are only ever overwritten: a thread that reads the
// variable meanwhile may see a mixture, never freed memory.
constexpr char NAME[] = "UCX_NET_DEVICES=";
char variable[sizeof NAME + 1024];
char users_choice[1024];

void choose(const char* devices) {
    std::snprintf(variable + sizeof NAME - 1, sizeof variable - sizeof NAME, "%s", devices);
}

void prepare_environment() {
    // By cma a frozen writer's kernel could write to our memory later, by xpmem or knem likewise, by cuda_ipc its GPU: no
    // closing of this side's end would stop that.
    setenv("UCX_TLS", "^cma,knem,xpmem,cuda_ipc", 0);
    // Every failure is reported by this package; the libraries' own lines would only repeat it.
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    setenv("NIXL_LOG_LEVEL", "FATAL", 0);
    const char* chosen = std::getenv("UCX_NET_DEVICES");
    std::snprintf(users_choice, sizeof users_choice, "%s", chosen ? chosen : "all");
    std::memcpy(variable, NAME, sizeof NAME);
    choose(users_choice);
    putenv(variable);
}

template <class Function>
bool find(void* library, const char* name, Function& function, const char** missing) {
    char symbol[80];
    std::snprintf(symbol, sizeof symbol, "nixl_capi_%s", name);
    void* found = dlsym(library, symbol);
    if (!found && !*missing) *missing = name;
    std::memcpy(&function, &found, sizeof function);
    return found;
}

const char* find_all(void* library) {
    const char* missing = nullptr;
#define P2P_FIND(name, ...) find(library, #name, table.name, &missing);
    P2P_NIXL_FUNCTIONS(P2P_FIND)
#undef P2P_FIND
    return missing;
}

}  // namespace

const Functions* functions() {
    std::lock_guard lock(loading);
    return loaded;
}

RailChoice::RailChoice(const char* rail) : alone_(choosing) {
    if (*rail) choose(rail);
}

RailChoice::~RailChoice() { choose(users_choice); }

}  // namespace p2p::nixl

P2P_API int p2p_nixl_load(const char* file, char* error, uint64_t error_bytes) {
    using namespace p2p::nixl;
    std::lock_guard lock(loading);
    if (loaded) return 0;
    prepare_environment();
    // Never unloaded: UCX leaves threads and hooks behind.
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::snprintf(error, error_bytes, "%s", dlerror());
        return -1;
    }
    if (const char* missing = find_all(library)) {
        std::snprintf(error, error_bytes, "%s has no function nixl_capi_%s", file, missing);
        return -1;
    }
    loaded = &table;
    return 0;
}
