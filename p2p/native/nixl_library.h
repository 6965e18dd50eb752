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

struct Functions {
    int (*create_configured_agent)(const char* name, const void* config, Handle* agent);
    int (*destroy_agent)(Handle agent);
    int (*create_params)(Handle* params);
    int (*destroy_params)(Handle params);
    int (*create_backend)(Handle agent, const char* plugin, Handle params, Handle* backend);
    int (*destroy_backend)(Handle backend);
    int (*get_local_md)(Handle agent, void** data, size_t* bytes);
    int (*load_remote_md)(Handle agent, const void* data, size_t bytes, char** name);
    int (*create_reg_dlist)(int kind, Handle* list);
    int (*destroy_reg_dlist)(Handle list);
    int (*reg_dlist_add_desc)(Handle list, uintptr_t at, size_t bytes, uint64_t device, const void*, size_t);
    int (*register_mem)(Handle agent, Handle list, Handle options);
    int (*create_xfer_dlist)(int kind, Handle* list);
    int (*destroy_xfer_dlist)(Handle list);
    int (*xfer_dlist_clear)(Handle list);
    int (*xfer_dlist_add_desc)(Handle list, uintptr_t at, size_t bytes, uint64_t device);
    int (*create_opt_args)(Handle* options);
    int (*destroy_opt_args)(Handle options);
    int (*opt_args_set_notif_msg)(Handle options, const void* data, size_t bytes);
    int (*opt_args_set_has_notif)(Handle options, bool value);
    int (*create_xfer_req)(Handle agent, int operation, Handle local, Handle remote, const char* remote_agent,
                           Handle* request, Handle options);
    int (*post_xfer_req)(Handle agent, Handle request, Handle options);
    int (*get_xfer_status)(Handle agent, Handle request);
    int (*release_xfer_req)(Handle agent, Handle request);
    int (*destroy_xfer_req)(Handle request);
    int (*gen_notif)(Handle agent, const char* remote_agent, const void* data, size_t bytes, Handle options);
    int (*create_notif_map)(Handle* map);
    int (*destroy_notif_map)(Handle map);
    int (*notif_map_clear)(Handle map);
    int (*notif_map_size)(Handle map, size_t* agents);
    int (*notif_map_get_agent_at)(Handle map, size_t index, const char** name);
    int (*notif_map_get_notifs_size)(Handle map, const char* name, size_t* notes);
    int (*notif_map_get_notif)(Handle map, const char* name, size_t index, const void** data, size_t* bytes);
    int (*get_notifs)(Handle agent, Handle map, Handle options);
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

constexpr size_t RAIL_BYTES = 128;  // longest name of a rail, with its end

}  // namespace p2p::nixl

// Load libnixl_capi.so from that file, once per process. 0, or -1 with the reason in `error`.
P2P_API int p2p_nixl_load(const char* file, char* error, uint64_t error_bytes);
