// XLA's runtime for handlers that run without it: the functions that they ask for, and the frame of
// a call.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

struct XLA_FFI_Error {
  std::string message;
};

// What the functions return: of the call that runs.
inline void* state = nullptr;
inline uintptr_t stream_of_call = 0;

template <class... Args>
XLA_FFI_Error* Succeeds(Args...) {
  return nullptr;
}

inline XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api;
  memset(&api, 0, sizeof api);
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->message};
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_Type_Register = [](XLA_FFI_Type_Register_Args* args) {
    args->type_id->type_id = 1;
    return Succeeds();
  };
  api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) {
    state = args->state;
    return Succeeds();
  };
  api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) {
    args->state = state;
    return Succeeds();
  };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) {
    args->stream = reinterpret_cast<void*>(stream_of_call);
    return Succeeds();
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) {
    args->device_ordinal = 0;
    return Succeeds();
  };
  return api;
}

// The attributes of a call, and its arguments.
struct Frame {
  using Buffers = std::vector<XLA_FFI_Buffer>;

  XLA_FFI_Api api = MakeApi();
  XLA_FFI_CallFrame frame;
  std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> attributes;  // sorted, as XLA's are
  std::vector<XLA_FFI_ByteSpan> spans;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<void*> values;

  // Runs a handler; returns its error's text.
  std::string Run(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_ExecutionStage stage,
                  Buffers xs = {}, Buffers ys = {}) {
    memset(&frame, 0, sizeof frame);
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = stage;
    std::vector<XLA_FFI_ArgType> arguments(xs.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> results(ys.size(), XLA_FFI_RetType_BUFFER);
    std::vector<void*> x, y;
    for (XLA_FFI_Buffer& buffer : xs) x.push_back(&buffer);
    for (XLA_FFI_Buffer& buffer : ys) y.push_back(&buffer);
    const auto count = [](const auto& all) { return static_cast<int64_t>(all.size()); };
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, count(x), arguments.data(), x.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, count(y), results.data(), y.data()};
    spans.clear(), names.clear(), types.clear(), values.clear();
    for (const auto& [name, value] : attributes) spans.push_back({name.data(), name.size()});
    for (auto& span : spans) names.push_back(&span);
    for (const auto& [name, value] : attributes) {
      types.push_back(value.first);
      values.push_back(value.second);
    }
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                   nullptr,
                   count(types),
                   types.data(),
                   names.data(),
                   values.data()};
    XLA_FFI_Error* const error = handler(&frame);
    std::string text = error == nullptr ? "" : error->message;
    delete error;
    return text;
  }
};
