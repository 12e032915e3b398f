// Runs the data operations of a model on symbolic memory: who touches which bytes, and what they
// hold afterwards.
#ifndef TIDE_VERIFY_DATAFLOW_H_
#define TIDE_VERIFY_DATAFLOW_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "verify/clocks.h"
#include "verify/contract.h"
#include "verify/expressions.h"
#include "verify/findings.h"
#include "verify/memory.h"
#include "verify/model.h"
#include "verify/operand.h"

namespace tide::verify {

class Dataflow {
 public:
  Dataflow(const Model& model, History* history, Findings* findings);

  // An operation other than a put, or a read or write of the caller.
  void Run(const Step& step, const Actor& actor);
  // `reader` is the queue that puts, `writer` the piece on its wire.
  void Put(const Step& step, const PutPiece& put, const Actor& reader, const Actor& writer);

 private:
  void Copy(const Step& step, const Piece& piece, const Actor& actor);
  void Zero(const Step& step, const Piece& piece, const Actor& actor);
  void Cast(const Step& step, const CastPiece& piece, const Actor& actor);
  void Refresh(const Step& step, const CastPiece& piece, const Actor& actor);
  void Sum(const Step& step, const SumPiece& piece, const Actor& actor);
  void Land(const Step& step, const LandPiece& piece, const Actor& actor);
  void CallerWrite(const Step& step, const Actor& actor);
  void CallerRead(const Step& step, const Actor& actor);

  Memory& At(int object, int rank);
  void Read(const Step& step, Place place, int rank, int64_t bytes, const Actor& actor,
            std::vector<Portion>* portions);
  void Write(const Step& step, Place place, int rank, int64_t bytes, const Actor& actor,
             const std::vector<Portion>& portions);
  // To memory of the whole node once.
  void WriteTargets(const Step& step, Place place, int64_t bytes, const Actor& actor,
                    const std::vector<Portion>& portions, int source_memory = -1);
  Operand ReadOperand(const Step& step, Place place, int rank, int64_t elems, DType dtype,
                      const Actor& actor);
  // dst = [dst +] [scale *] sum, with the operands' elements side by side.
  void Combine(const Step& step, Ref dst, DType dst_dtype, int64_t elems,
               std::vector<Operand> operands, const Actor& actor);
  // The expression that the operands' fronts make, before it is stored; or kWrongExpr.
  ExprId Add(const Step& step, const std::vector<Operand>& operands, const Operand* old);
  // Of the memories that the operation writes.
  void CheckAlike(const Step& step, Place place, int64_t bytes);
  void Wrong(const Step& step, Place place, int rank, int64_t bytes, std::string detail);
  // The ranks whose memory an operation writes.
  std::vector<int> Targets(const Step& step) const;
  bool Predecessor(const Step& step) const {
    return model_.input().calls[static_cast<size_t>(step.call)].predecessor;
  }

  const Model& model_;
  History& history_;
  Findings& findings_;
  Expressions expressions_;
  Contract contract_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::vector<Portion> scratch_;
  const Step* reported_ = nullptr;  // one wrong value a step is enough
};

}  // namespace tide::verify

#endif  // TIDE_VERIFY_DATAFLOW_H_
