//! The metadata of an EC2 instance, version 2: every request needs a token, which is fetched first.

use std::time::Duration;

use reqwest::{Client, StatusCode};
use tokio::sync::Mutex;
use tokio::time::Instant;

/// The most bytes of an answer.
const MAX_ANSWER: usize = 64 << 10;
/// The lifetime that is requested for a token, in seconds.
const TOKEN_SECONDS: u64 = 300;

/// A client of the metadata service. It never uses a proxy.
pub struct Imds {
    client: Client,
    endpoint: String,
    token: Mutex<Option<(String, Instant)>>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The service has nothing under this name.
    #[error("{0}: not found")]
    Absent(String),
    /// The service refused.
    #[error("{path}: status {status}")]
    Refused {
        /// What was asked for.
        path: String,
        /// The status.
        status: u16,
    },
    /// Nobody answered in time, or the answer cannot be used.
    #[error("no usable answer from the instance metadata service: {0}")]
    Unreachable(String),
}

impl Imds {
    /// Makes a client, which sends nothing yet. `endpoint` is an address such as `http://169.254.169.254`.
    ///
    /// # Errors
    /// If no client can be made.
    pub fn new(endpoint: &str) -> Result<Self, NoAnswer> {
        let client = Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(1))
            .timeout(Duration::from_secs(2))
            .build()
            .map_err(|e| NoAnswer::Unreachable(e.to_string()))?;
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Ok(Self { client, endpoint, token: Mutex::new(None) })
    }

    /// The value at a path such as `/latest/meta-data/instance-id`.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub async fn get(&self, path: &str) -> Result<String, NoAnswer> {
        let token = self.token().await?;
        let url = format!("{}{path}", self.endpoint);
        let answer = self.client.get(url).header("X-aws-ec2-metadata-token", token).send().await;
        let answer = answer.map_err(|e| unreachable(&e))?;
        match answer.status() {
            StatusCode::OK => body(answer).await,
            StatusCode::NOT_FOUND => Err(NoAnswer::Absent(path.to_owned())),
            status => {
                // The token may have been refused: do not use it again.
                self.token.lock().await.take();
                Err(NoAnswer::Refused { path: path.to_owned(), status: status.as_u16() })
            }
        }
    }

    async fn token(&self) -> Result<String, NoAnswer> {
        let mut kept = self.token.lock().await;
        if let Some((token, end)) = &*kept
            && *end > Instant::now()
        {
            return Ok(token.clone());
        }
        let url = format!("{}/latest/api/token", self.endpoint);
        let ask = self.client.put(url);
        let ask = ask.header("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS);
        let answer = ask.send().await.map_err(|e| unreachable(&e))?;
        if answer.status() != StatusCode::OK {
            let (path, status) = ("/latest/api/token".to_owned(), answer.status().as_u16());
            return Err(NoAnswer::Refused { path, status });
        }
        let token = body(answer).await?;
        let end = Instant::now() + Duration::from_secs(TOKEN_SECONDS / 2);
        *kept = Some((token.clone(), end));
        Ok(token)
    }
}

fn unreachable(e: &reqwest::Error) -> NoAnswer {
    let why = if e.is_timeout() { "timeout" } else { "no connection" };
    NoAnswer::Unreachable(why.to_owned())
}

/// The text of an answer, of bounded size.
pub(crate) async fn body(answer: reqwest::Response) -> Result<String, NoAnswer> {
    let bytes = bounded(answer).await.map_err(NoAnswer::Unreachable)?;
    String::from_utf8(bytes).map_err(|_| NoAnswer::Unreachable("the answer is not text".into()))
}

/// The bytes of an answer, of bounded size.
pub(crate) async fn bounded(mut answer: reqwest::Response) -> Result<Vec<u8>, String> {
    let mut bytes = vec![];
    while let Some(more) = answer.chunk().await.map_err(|e| e.without_url().to_string())? {
        if bytes.len() + more.len() > MAX_ANSWER {
            return Err(format!("the answer has more than {MAX_ANSWER} bytes"));
        }
        bytes.extend_from_slice(&more);
    }
    Ok(bytes)
}
