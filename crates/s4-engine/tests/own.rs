//! An embedder's own codec and predictor, each a single value given to an engine.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

mod common;

use common::encode;
use s4_codec_cpu::{Codec, Context, Encoded, Symbols, Workspace, open_codecs};
use s4_engine::{
    CpuEngine, DecodeJob, InputValues, PlanJob, PlaneCoding, Preset, Scratch, TensorPlan,
    TensorSpec, TensorView,
};
use s4_format::{
    ChunkRecord, CodecId, DType, Error, LayoutId, Plan, PredictorId, ResidualId, Result,
};
use s4_planes::{Kernels, Simd};
use s4_predict::{ContextModel, Known, NoContexts, Predict, Predicted, Predictors, Tensor};

/// Two symbols below 16 in a byte, each minus the parameter.
#[derive(Debug)]
struct Nibbles;

/// Number of streams that a thread coded.
#[derive(Default)]
struct Streams(usize);

const NIBBLES: CodecId = CodecId(200);

impl Codec for Nibbles {
    fn id(&self) -> CodecId {
        NIBBLES
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        len.div_ceil(2)
    }

    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded> {
        let param = symbols.context.param;
        let fits = |b: &u8| (param..param + 16).contains(b);
        if !symbols.bytes.iter().all(fits) {
            return Err(Error::unsupported("symbols of more than four bits"));
        }
        work.state::<Streams>().0 += 1;
        for (to, two) in dst.iter_mut().zip(symbols.bytes.chunks(2)) {
            *to = (two[0] - param) | two.get(1).map_or(0, |b| b - param) << 4;
        }
        Ok(Encoded::of(symbols.bytes.len().div_ceil(2)))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<()> {
        if src.len() != dst.len().div_ceil(2) {
            return Err(Error::truncated("half as many bytes as symbols"));
        }
        work.state::<Streams>().0 += 1;
        for (two, from) in dst.chunks_mut(2).zip(src) {
            let both = [from & 15, from >> 4];
            two.iter_mut().zip(both).for_each(|(to, b)| *to = b + ctx.param);
        }
        Ok(())
    }
}

fn engine() -> CpuEngine {
    let simd = Simd::detect();
    CpuEngine::with_codecs(simd, open_codecs(simd).with(Nibbles))
}

/// A plan for `view`, changed.
fn plan(view: &TensorView<'_>, change: impl FnOnce(&mut TensorPlan)) -> TensorPlan {
    let job = PlanJob::new(Preset::Fast, view);
    let mut plan = engine().plan(&job, &mut Scratch::default()).unwrap();
    change(&mut plan);
    plan
}

/// Decodes it over what `to` holds.
fn decode(
    engine: &CpuEngine,
    (view, plan): (&TensorView<'_>, &TensorPlan),
    (record, frame): &(ChunkRecord, Vec<u8>),
    inputs: &[InputValues<'_>],
    mut to: Vec<u8>,
) -> Result<Vec<u8>> {
    let side = plan.side_data(false)?;
    let spec = TensorSpec {
        dtype: view.dtype,
        shape: view.shape,
        plan: &plan.plan,
        side: &side,
        chunk_log2: plan.chunk_log2,
    };
    let job = DecodeJob { spec: &spec, chunk: 0, record, frame, inputs };
    engine.decode(&job, &mut Scratch::default(), &mut to).map(|()| to)
}

#[test]
fn a_codec_of_ones_own_encodes_and_decodes() {
    let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 20) as u8 % 16;
    let data: Vec<u8> = (0..5001).map(|i| 40 + noise(i)).collect();
    let view = TensorView { dtype: DType::UInt8, shape: &[5001], data: &data };
    let plan = plan(&view, |plan| {
        plan.plan = Plan::direct(LayoutId::WHOLE);
        plan.planes = vec![PlaneCoding::new(NIBBLES, 40)];
    });
    let engine = engine();
    let coded = encode(&engine, &view, &plan, &[]).unwrap();
    assert!(!coded.0.plain && coded.1.len() < 2600, "{} bytes", coded.1.len());
    assert!(decode(&engine, (&view, &plan), &coded, &[], vec![0; 5001]).unwrap() == data);
    // An engine without it refuses the plan and the frame.
    let other = CpuEngine::new(Simd::detect());
    let refused = encode(&other, &view, &plan, &[]).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    let refused = decode(&other, (&view, &plan), &coded, &[], vec![0; 5001]).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
}

/// Predicts a byte of the input, plus three; with contexts, the second plane's symbols depend on the first's.
#[derive(Debug)]
struct PlusThree {
    contexts: bool,
}

/// Four tables for the second plane.
#[derive(Debug)]
struct ByFirstPlane;

const PLUS_THREE: PredictorId = PredictorId(77);
const TABLES: u8 = 4;

impl Predict for PlusThree {
    fn id(&self) -> PredictorId {
        PLUS_THREE
    }

    fn inputs(&self) -> &'static [s4_predict::InputKind] {
        &[s4_predict::InputKind::Parent]
    }

    fn predict(
        &self,
        _: Kernels,
        tensor: &Tensor<'_>,
        first: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        assert!(first as usize + out.len() / 2 <= tensor.shape[0] as usize);
        out.iter_mut().zip(inputs[0]).for_each(|(to, b)| *to = b.wrapping_add(3));
        Ok(Predicted::Written)
    }

    fn contexts(&self) -> &dyn ContextModel {
        if self.contexts { &ByFirstPlane } else { &NoContexts }
    }
}

impl ContextModel for ByFirstPlane {
    fn tables(&self, _: LayoutId, plane: usize) -> usize {
        if plane == 1 { TABLES.into() } else { 1 }
    }

    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()> {
        assert_eq!(known.inputs[0].len(), 2 * out.len());
        out.iter_mut().zip(known.planes[0]).for_each(|(table, b)| *table = b % TABLES);
        Ok(())
    }
}

#[test]
fn a_predictor_of_ones_own_has_inputs_and_contexts() {
    let n = 60_000usize;
    let mut x = 1u64;
    let mut noise = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    let input: Vec<u8> = (0..2 * n).map(|_| noise()).collect();
    // The high byte differs from its prediction by 0 to 3, and the low byte by about 50 times as much.
    let mut data: Vec<u8> = input.iter().map(|b| b.wrapping_add(3)).collect();
    for pair in data.chunks_mut(2) {
        let kind = noise() % TABLES;
        pair[1] ^= kind;
        pair[0] ^= 50 * kind + noise() % 4;
    }
    let view = TensorView { dtype: DType::UInt16, shape: &[n as u64], data: &data };
    for layout in [LayoutId::BYTES, LayoutId::WHOLE] {
        for residual in [ResidualId::XOR, ResidualId::SUB] {
            let plan = plan(&view, |plan| {
                plan.plan = Plan { predictor: PLUS_THREE, residual, ..Plan::direct(layout) };
                let planes = if layout == LayoutId::BYTES { 2 } else { 1 };
                plan.planes = vec![PlaneCoding::RANS8; planes];
            });
            let mut sizes = vec![];
            for contexts in [false, true] {
                let predictors = Predictors::none().with(PlusThree { contexts });
                let engine = engine().with_predictors(predictors);
                let coded = encode(&engine, &view, &plan, &[&input]).unwrap();
                assert!(!coded.0.plain);
                sizes.push(coded.1.len());
                let given = [InputValues::Slice(&input)];
                let of = (&view, &plan);
                assert!(decode(&engine, of, &coded, &given, vec![7; 2 * n]).unwrap() == data);
                let over = [InputValues::Destination];
                assert!(decode(&engine, of, &coded, &over, input.clone()).unwrap() == data);
                // Without the input, with too short a one, and by another engine: an error.
                assert!(decode(&engine, of, &coded, &[], input.clone()).is_err());
                let short = [InputValues::Slice(&input[1..])];
                assert!(decode(&engine, of, &coded, &short, input.clone()).is_err());
                assert!(encode(&engine, &view, &plan, &[]).is_err());
                let other = CpuEngine::new(Simd::detect());
                let refused = decode(&other, of, &coded, &given, input.clone()).unwrap_err();
                assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
            }
            if layout == LayoutId::BYTES && residual == ResidualId::XOR {
                assert!(sizes[1] * 10 < sizes[0] * 9, "contexts save a tenth: {sizes:?}");
            }
        }
    }
}
