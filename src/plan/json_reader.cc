#include "plan/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tide/error.h"

namespace tide::internal {
namespace {

// Enough of a value to recognise it.
std::string Excerpt(const nlohmann::json& value) {
  constexpr size_t kMaxChars = 60;
  std::string text = value.dump();
  if (text.size() > kMaxChars) text = text.substr(0, kMaxChars) + "...";
  return text;
}

[[noreturn]] void Throw(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace

void JsonField::Fail(const std::string& expected) const {
  Throw(fmt::format("{}: expected {}, got {}", path_.empty() ? "the document" : path_, expected,
                    Excerpt(*value_)));
}

std::string JsonField::Child(const std::string& key) const {
  return path_.empty() ? key : path_ + "." + key;
}

bool JsonField::Has(const char* key) const {
  if (!value_->is_object()) Fail("an object");
  return value_->contains(key);
}

JsonField JsonField::At(const char* key) const {
  if (!Has(key)) Throw(fmt::format("{}: missing", Child(key)));
  return {(*value_)[key], Child(key)};
}

void JsonField::AllowOnly(const std::vector<std::string>& keys) const {
  if (!value_->is_object()) Fail("an object");
  for (const auto& [key, unused] : value_->items()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      Throw(
          fmt::format("{}: unknown field; expected one of {}", Child(key), fmt::join(keys, ", ")));
    }
  }
}

std::vector<JsonField> JsonField::Items() const {
  if (!value_->is_array()) Fail("a list");
  std::vector<JsonField> items;
  for (size_t i = 0; i < value_->size(); ++i) {
    items.emplace_back((*value_)[i], fmt::format("{}[{}]", path_, i));
  }
  return items;
}

int64_t JsonField::Integer(int64_t low, int64_t high) const {
  const bool fits =
      value_->is_number_integer() && (!value_->is_number_unsigned() ||
                                      value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (!fits || value_->get<int64_t>() < low || value_->get<int64_t>() > high) {
    Fail(high == INT64_MAX ? fmt::format("an integer >= {}", low)
                           : fmt::format("an integer in [{}, {}]", low, high));
  }
  return value_->get<int64_t>();
}

double JsonField::Number(double low, double high) const {
  if (!value_->is_number() || value_->get<double>() < low || value_->get<double>() > high) {
    Fail(fmt::format("a number in [{:g}, {:g}]", low, high));
  }
  return value_->get<double>();
}

bool JsonField::Bool() const {
  if (!value_->is_boolean()) Fail("true or false");
  return value_->get<bool>();
}

std::string JsonField::String() const {
  if (!value_->is_string()) Fail("a string");
  return value_->get<std::string>();
}

nlohmann::json ParseJson(const std::string& text, const std::string& what) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    Throw(fmt::format("{}: expected JSON: {}", what, error.what()));
  }
}

}  // namespace tide::internal
