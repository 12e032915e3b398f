#include "fabric/nccl/agreement.h"

#include <fmt/format.h>

#include <exception>
#include <vector>

#include "tide/error.h"

namespace tide::nccl {
namespace {

// What one rank says: how it went, then what it asked for.
struct Word {
  int code = -1;  // -1: it went well
  std::string error;
  std::string request;
};

std::string Encode(const Word& word) {
  return fmt::format("{} {} {}{}", word.code, word.error.size(), word.error, word.request);
}

Word Decode(const std::string& text) {
  Word word;
  size_t used = 0;
  word.code = std::stoi(text, &used);
  size_t at = used + 1;
  const auto error_bytes = static_cast<size_t>(std::stoul(text.substr(at), &used));
  at += used + 1;
  word.error = text.substr(at, error_bytes);
  word.request = text.substr(at + error_bytes);
  return word;
}

std::vector<Word> Exchange(Bootstrap& bootstrap, const std::string& request,
                           const std::function<void()>& step) {
  Word mine{-1, "", request};
  try {
    step();
  } catch (const Error& error) {
    mine.code = static_cast<int>(error.code());
    mine.error = error.what();
  } catch (const std::exception& error) {
    // The others wait for this rank's word, whatever went wrong.
    mine.code = static_cast<int>(ErrorCode::kInternal);
    mine.error = error.what();
  }
  std::vector<Word> words;
  for (const std::string& text : bootstrap.AllGather(Encode(mine))) words.push_back(Decode(text));
  return words;
}

size_t FirstFailed(const std::vector<Word>& words) {
  size_t rank = 0;
  while (rank < words.size() && words[rank].code < 0) ++rank;
  return rank;
}

}  // namespace

void TakeStep(Bootstrap& bootstrap, const std::string& what, const std::string& request,
              const std::function<void()>& step) {
  const std::vector<Word> words = Exchange(bootstrap, request, step);
  const size_t failed = FirstFailed(words);
  if (failed < words.size()) {
    throw Error(static_cast<ErrorCode>(words[failed].code),
                fmt::format("{}: rank {}: {}", what, failed, words[failed].error),
                {bootstrap.rank(), static_cast<int>(failed), "", what});
  }
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].request == words[0].request) continue;
    throw Error(
        ErrorCode::kMismatch,
        fmt::format("{}: rank 0 asks for {}, rank {} for {}; expected the same on all ranks", what,
                    words[0].request, rank, words[rank].request),
        {bootstrap.rank(), static_cast<int>(rank), "", what});
  }
}

void TakeCapabilityStep(Bootstrap& bootstrap, const std::string& what,
                        const std::function<void()>& step) {
  const std::vector<Word> words = Exchange(bootstrap, "", step);
  size_t lacking = 0;
  for (const Word& word : words) lacking += word.code >= 0 ? 1 : 0;
  if (lacking == 0) return;
  const size_t failed = FirstFailed(words);
  const bool everywhere = lacking == words.size();
  throw Error(
      everywhere ? static_cast<ErrorCode>(words[failed].code) : ErrorCode::kMismatch,
      everywhere
          ? fmt::format("{}: {}", what, words[failed].error)
          : fmt::format("{}: {} of {} ranks can't, first rank {}: {}; expected the same on all "
                        "ranks",
                        what, lacking, words.size(), failed, words[failed].error),
      {bootstrap.rank(), static_cast<int>(failed), "", what});
}

std::string TakeOptionalStep(Bootstrap& bootstrap, const std::string& what,
                             const std::function<void()>& step) {
  try {
    TakeCapabilityStep(bootstrap, what, step);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return error.what();
  }
  return "";
}

}  // namespace tide::nccl
