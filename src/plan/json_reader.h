// Reads JSON from people: every error names the path of the offending field, and a misspelt field
// is an error.
//
//   JsonField root = ParseJson(text, "machine");
//   root.AllowOnly({"name", "k_max"});
//   int k = root.Has("k_max") ? root.At("k_max").Integer(1, 64) : 4;
#ifndef TIDE_PLAN_JSON_READER_H_
#define TIDE_PLAN_JSON_READER_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tide::internal {

// A value and where it stands, "groups[0].params[1].rows". A view: the document must outlive it.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const std::string& path() const { return path_; }

  // Objects.
  bool Has(const char* key) const;
  JsonField At(const char* key) const;
  void AllowOnly(const std::vector<std::string>& keys) const;
  // Arrays.
  std::vector<JsonField> Items() const;
  // Scalars. Bounds are inclusive.
  int64_t Integer(int64_t low, int64_t high) const;
  double Number(double low, double high) const;
  bool Bool() const;
  std::string String() const;
  bool IsString() const { return value_->is_string(); }
  std::string Dump() const { return value_->dump(); }

  // Throws Error(kInvalidArgument): "path: expected <expected>, got <value>".
  [[noreturn]] void Fail(const std::string& expected) const;

 private:
  std::string Child(const std::string& key) const;

  const nlohmann::json* value_;
  std::string path_;
};

// Throws Error(kInvalidArgument) with line and column for text that is not JSON.
nlohmann::json ParseJson(const std::string& text, const std::string& what);

}  // namespace tide::internal

#endif  // TIDE_PLAN_JSON_READER_H_
