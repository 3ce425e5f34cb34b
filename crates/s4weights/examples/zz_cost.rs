use s4_codec_cpu::rans::*;
fn main() {
    for f in ["gpt98m_fp32_s0", "gpt34m_bf16_s0"] {
        let data = std::fs::read(format!("/work/shared/corpus/{f}.safetensors")).unwrap();
        let st = safetensors::SafeTensors::deserialize(&data).unwrap();
        for n in st.names() {
            let t = st.tensor(n).unwrap();
            let w = if f.contains("fp32") { 4 } else { 2 };
            let e: Vec<u8> = t
                .data()
                .chunks(w)
                .map(|c| {
                    let v = u16::from_le_bytes([c[w - 2], c[w - 1]]);
                    (v >> 7) as u8
                })
                .collect();
            if e.len() < 4096 {
                continue;
            }
            let mut s = [0.0; 8];
            for g in e.chunks(65536) {
                let mut full = Counts::new();
                for p in g.chunks(8192) {
                    full.add_stream(p)
                }
                let samp = Counts::of_stream(g);
                let mut h = 0.0;
                for i in 0..256 {
                    let c = full.get(i as u8) as f64;
                    if c > 0.0 {
                        h -= c * (c / g.len() as f64).log2()
                    }
                }
                s[0] += h;
                for (k, p) in [(1, Precision::P8), (3, Precision::P12)] {
                    s[k] += cost(&full, &full.table(p)) as f64;
                    s[k + 1] += cost(&full, &samp.table(p)) as f64;
                }
                s[5] += samp.table(Precision::P8).encoded_len() as f64 * 8.0;
            }
            let n2 = e.len() as f64;
            println!(
                "{n:45} H {:.4} P8 full +{:.4} samp +{:.4}  P12 full +{:.4} samp +{:.4} table {:.4}",
                s[0] / n2,
                (s[1] - s[0]) / n2,
                (s[2] - s[0]) / n2,
                (s[3] - s[0]) / n2,
                (s[4] - s[0]) / n2,
                s[5] / n2
            );
        }
    }
}
