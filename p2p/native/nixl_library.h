// NIXL's C interface, found at run time: building this package needs neither its headers nor the library.
//
// Checked against nixl-cu13 1.5.1. A library that lacks one of these names is refused when it is loaded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "p2p/native/api.h"

namespace p2p::nixl {

constexpr int DONE = 0;
constexpr int UNDER_WAY = 1;  // negative: an error
constexpr int HOST_MEMORY = 0;
constexpr int GPU_MEMORY = 1;
constexpr int WRITE = 1;

using Handle = void*;  // agents, descriptor lists, requests...

// Its functions: the name without nixl_capi_, then the types of the arguments. Each returns 0 or an error.
#define P2P_NIXL_FUNCTIONS(X) \
    X(create_configured_agent, const char* name, const void* config, Handle* agent) \
    X(destroy_agent, Handle agent) \
    X(create_params, Handle* params) \
    X(destroy_params, Handle params) \
    X(create_backend, Handle agent, const char* plugin, Handle params, Handle* backend) \
    X(destroy_backend, Handle backend) \
    X(get_local_md, Handle agent, void** data, size_t* bytes) \
    X(load_remote_md, Handle agent, const void* data, size_t bytes, char** name) \
    X(create_reg_dlist, int kind, Handle* list) \
    X(destroy_reg_dlist, Handle list) \
    X(reg_dlist_add_desc, Handle list, uintptr_t at, size_t bytes, uint64_t device, const void*, size_t) \
    X(register_mem, Handle agent, Handle list, Handle options) \
    X(create_xfer_dlist, int kind, Handle* list) \
    X(destroy_xfer_dlist, Handle list) \
    X(xfer_dlist_clear, Handle list) \
    X(xfer_dlist_add_desc, Handle list, uintptr_t at, size_t bytes, uint64_t device) \
    X(create_opt_args, Handle* options) \
    X(destroy_opt_args, Handle options) \
    X(opt_args_set_notif_msg, Handle options, const void* data, size_t bytes) \
    X(opt_args_set_has_notif, Handle options, bool value) \
    X(create_xfer_req, Handle agent, int operation, Handle local, Handle remote, \
      const char* remote_agent, Handle* request, Handle options) \
    X(post_xfer_req, Handle agent, Handle request, Handle options) \
    X(get_xfer_status, Handle agent, Handle request) \
    X(release_xfer_req, Handle agent, Handle request) \
    X(destroy_xfer_req, Handle request) \
    X(gen_notif, Handle agent, const char* remote_agent, const void* data, size_t bytes, Handle options) \
    X(create_notif_map, Handle* map) \
    X(destroy_notif_map, Handle map) \
    X(notif_map_clear, Handle map) \
    X(notif_map_size, Handle map, size_t* agents) \
    X(notif_map_get_agent_at, Handle map, size_t index, const char** name) \
    X(notif_map_get_notifs_size, Handle map, const char* name, size_t* notes) \
    X(notif_map_get_notif, Handle map, const char* name, size_t index, const void** data, size_t* bytes) \
    X(get_notifs, Handle agent, Handle map, Handle options)

struct Functions {
#define P2P_NIXL_FUNCTION(name, ...) int (*name)(__VA_ARGS__);
    P2P_NIXL_FUNCTIONS(P2P_NIXL_FUNCTION)
#undef P2P_NIXL_FUNCTION
};

// Null before p2p_nixl_load has succeeded.
const Functions* functions();

// While it lives UCX, in this process, is told to use one rail alone; an empty one leaves the choice to the
// user's UCX_NET_DEVICES, else to UCX. One at a time: an agent reads the variable when it is made.
class RailChoice {
  public:
    explicit RailChoice(const char* rail);
    ~RailChoice();
    RailChoice(const RailChoice&) = delete;
    RailChoice& operator=(const RailChoice&) = delete;

  private:
    std::unique_lock<std::mutex> alone_;
};

}  // namespace p2p::nixl

// Load libnixl_capi.so from that file, once per process. 0, or -1 with the reason in `error`.
P2P_API int p2p_nixl_load(const char* file, char* error, uint64_t error_bytes);
