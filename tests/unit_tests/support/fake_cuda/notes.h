// What the pretended device tells Python about what it is asked to do.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace pretended {

// Calls `pretended::note(kind, what)`, which Python implements: it counts, says where, and may raise.
inline void note(const std::string& kind, const std::string& what) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("pretended::note", "").typed<void(c10::string_view, c10::string_view)>();
  op.call(kind, what);
}

}  // namespace pretended
