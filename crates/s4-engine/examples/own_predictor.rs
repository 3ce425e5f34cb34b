//! A custom predictor, for values that count up, under an id for private experiments.
//!
//! [`Ramp`] is all that an embedder writes. An engine that has it encodes and decodes the plans
//! that name it; the residuals go through layouts and codecs as usual.

use s4_engine::{
    CpuEngine, DecodeJob, EncodeJob, PlanJob, PlaneCoding, Preset, Scratch, TensorPlan, TensorSpec,
    TensorView, chunk_log2,
};
use s4_format::{ChunkRecord, DType, LayoutId, Plan, PredictorId, ResidualId, Result};
use s4_planes::{Kernels, Simd};
use s4_predict::{InputKind, Predict, Predicted, Tensor, predictors};

/// The format does not name it: no other reader decodes tensors that were predicted by it.
const RAMP: PredictorId = PredictorId(240);

/// The value at index `i` is expected to be `100 * i`.
#[derive(Debug, Clone, Copy)]
struct Ramp;

impl Predict for Ramp {
    fn id(&self) -> PredictorId {
        RAMP
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[]
    }

    fn predict(
        &self,
        _: Kernels,
        tensor: &Tensor<'_>,
        first: u64,
        _: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        for (i, value) in (first..).zip(out.chunks_mut(tensor.dtype.value_width())) {
            let len = value.len();
            value.copy_from_slice(&(100 * i).to_le_bytes()[..len]);
        }
        Ok(Predicted::Written)
    }
}

/// Encodes the only chunk of a tensor by a plan, and decodes it. Returns the size of its frame.
fn round_trip(engine: &CpuEngine, view: &TensorView<'_>, plan: &TensorPlan) -> Result<usize> {
    let (mut scratch, mut frame) = (Scratch::default(), vec![]);
    let job = EncodeJob { view, plan, chunk: 0, inputs: &[] };
    let encoded = engine.encode(&job, &mut scratch, &mut frame)?;
    let record = ChunkRecord {
        offset: 0,
        object: 0,
        len: frame.len() as u32,
        plain: encoded.plain,
        crc_encoded: encoded.crc_encoded,
        crc_raw: encoded.crc_raw,
    };
    let side = plan.side_data(encoded.shared)?;
    let (dtype, shape, chunk_log2) = (view.dtype, view.shape, plan.chunk_log2);
    let spec = TensorSpec { dtype, shape, plan: &plan.plan, side: &side, chunk_log2 };
    let job = DecodeJob { spec: &spec, chunk: 0, record: &record, frame: &frame, inputs: &[] };
    let mut back = vec![0; view.data.len()];
    engine.decode(&job, &mut scratch, &mut back)?;
    assert!(back == view.data);
    Ok(frame.len())
}

fn main() -> Result<()> {
    let data: Vec<u8> = (0..50_000i32).flat_map(|i| (100 * i + i % 3).to_le_bytes()).collect();
    let view = TensorView { dtype: DType::Int32, shape: &[50_000], data: &data };
    let engine = CpuEngine::new(Simd::detect()).with_predictors(predictors().with(Ramp));

    // The planner's own choice, and the same with the prediction in front.
    let job = PlanJob::new(Preset::Fast, &view);
    let direct = engine.plan(&job, &mut Scratch::default())?;
    let (residual, layout) = (ResidualId::SUB, LayoutId::BYTES);
    let plan = Plan { predictor: RAMP, residual, ..Plan::direct(layout) };
    let predicted = TensorPlan::new(plan, vec![PlaneCoding::RANS8; 4], chunk_log2(view.dtype));

    let (without, with) =
        (round_trip(&engine, &view, &direct)?, round_trip(&engine, &view, &predicted)?);
    assert!(with < without / 2);
    println!("{} bytes became {without} without a prediction and {with} with it", data.len());
    Ok(())
}

#[test]
fn it_runs() -> Result<()> {
    main()
}
