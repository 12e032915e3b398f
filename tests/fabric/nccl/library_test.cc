// How NCCL is found, and why not.
#include <gtest/gtest.h>

#include <string>

#include "fabric/nccl/nccl_library.h"
#include "tide/config.h"
#include "tide/error.h"

namespace tide {
namespace {

std::string Refusal(const std::string& path) {
  try {
    nccl::LoadNccl(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    return error.what();
  }
  return "";
}

TEST(NcclLibrary, SaysWhichVersionItExpects) {
  const std::string text = Refusal(TIDE_OLD_NCCL);
  EXPECT_NE(text.find("expected NCCL 2.31.2 or newer, got 2.28.9 from " TIDE_OLD_NCCL),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("tide nccl install"), std::string::npos) << text;
}

TEST(NcclLibrary, SaysThatAFileIsMissing) {
  const std::string text = Refusal("/nowhere/libnccl.so.2");
  EXPECT_NE(text.find("/nowhere/libnccl.so.2"), std::string::npos) << text;
  EXPECT_NE(text.find("TIDE_NCCL_LIBRARY"), std::string::npos) << text;
}

// This process has loaded none.
TEST(NcclLibrary, SaysHowToGetOne) {
  EXPECT_NE(Refusal("").find("no NCCL was found: run `tide nccl install`"), std::string::npos);
}

// Needs the library, but neither a GPU nor a driver.
TEST(NcclLibrary, HasAllFunctions) {
  const std::string path = NcclLibrary();
  if (path.empty()) GTEST_SKIP() << "no NCCL is installed; `tide nccl install`";
  EXPECT_EQ(nccl::LoadNccl(path)->Description().rfind("NCCL 2.", 0), 0U);
}

}  // namespace
}  // namespace tide
