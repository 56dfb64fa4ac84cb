use std::sync::Arc;
use std::sync::Mutex;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, put};

use super::*;

/// A metadata service that says what it is told to.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Said>>);

#[derive(Default)]
struct Said {
    action: Option<String>,
    advice: Option<String>,
    tokens: u32,
    /// Tokens up to this one are refused.
    expired: u32,
}

impl Fake {
    async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let page = |pick: fn(&Said) -> Option<String>| {
            get(move |State(fake): State<Self>, headers: HeaderMap| async move {
                let said = fake.0.lock().unwrap();
                let token = headers.get("X-aws-ec2-metadata-token").map(|t| t.to_str().unwrap());
                let token: u32 = token.unwrap_or("0").parse().unwrap();
                if token <= said.expired || token > said.tokens {
                    return (StatusCode::UNAUTHORIZED, String::new());
                }
                pick(&said)
                    .map_or((StatusCode::NOT_FOUND, String::new()), |text| (StatusCode::OK, text))
            })
        };
        let token = put(|State(fake): State<Self>, headers: HeaderMap| async move {
            assert!(headers.contains_key("X-aws-ec2-metadata-token-ttl-seconds"));
            let mut said = fake.0.lock().unwrap();
            said.tokens += 1;
            said.tokens.to_string()
        });
        let router = Router::new()
            .route("/latest/api/token", token)
            .route("/latest/meta-data/spot/instance-action", page(|said| said.action.clone()))
            .route("/latest/meta-data/events/recommendations/rebalance", page(|s| s.advice.clone()))
            .with_state(self.clone());
        tokio::spawn(async { axum::serve(listener, router).await });
        base
    }
}

#[tokio::test]
async fn aws_says_nothing_then_advises_then_takes_the_instance() {
    let fake = Fake::default();
    let mut aws = Aws::at(&fake.start().await);
    assert_eq!(aws.is_there().await, Ok(true));
    assert_eq!(aws.poll().await, Ok(None));
    fake.0.lock().unwrap().advice = Some("{\"noticeTime\": \"2026-12-06T08:22:00Z\"}".to_owned());
    let advice = aws.poll().await.unwrap().unwrap();
    assert!(advice.time_left.is_none() && advice.detail.contains("rebalance"), "{advice:?}");
    let at = humantime::format_rfc3339_seconds(SystemTime::now() + Duration::from_secs(100));
    fake.0.lock().unwrap().action =
        Some(format!("{{\"action\": \"terminate\", \"time\": \"{at}\"}}"));
    let notice = aws.poll().await.unwrap().unwrap();
    let left = notice.time_left.unwrap();
    assert!(left <= Duration::from_secs(100) && left > Duration::from_secs(40), "{notice:?}");
    assert!(notice.detail.contains("terminate"), "{notice:?}");
    fake.0.lock().unwrap().action = Some("{\"action\": \"hibernate\", \"time\": \"x\"}".to_owned());
    assert_eq!(aws.poll().await.unwrap().unwrap().time_left, Some(Duration::ZERO));
    fake.0.lock().unwrap().action = Some("{\"action\": \"stop\"}".to_owned());
    assert_eq!(aws.poll().await.unwrap().unwrap().time_left, Some(SPOT_NOTICE));
    fake.0.lock().unwrap().action = Some("rubbish".to_owned());
    assert!(aws.poll().await.unwrap_err().contains("rubbish"));
}

#[tokio::test]
async fn a_token_that_has_expired_is_renewed() {
    let fake = Fake::default();
    let mut aws = Aws::at(&fake.start().await);
    assert_eq!(aws.poll().await, Ok(None));
    fake.0.lock().unwrap().expired = 1;
    assert_eq!(aws.poll().await, Ok(None));
    assert_eq!(fake.0.lock().unwrap().tokens, 2);
}

#[tokio::test]
async fn where_there_is_no_metadata_service_that_is_known_at_once() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut aws = Aws::at(&format!("http://127.0.0.1:{port}"));
    assert!(aws.is_there().await.is_err());
}

#[tokio::test]
async fn a_file_is_a_notice_once_it_is_there_and_may_say_how_much_time_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("leave");
    let mut source = FileSource::new(path.clone());
    assert_eq!(source.poll().await, Ok(None));
    for (text, left) in [("", 120), ("7s\nmore", 7), ("2001-01-01T00:00:00Z", 0), ("soon", 120)] {
        std::fs::write(&path, text).unwrap();
        let notice = source.poll().await.unwrap().unwrap();
        assert_eq!(notice.time_left, Some(Duration::from_secs(left)), "{text:?}");
    }
}

#[tokio::test]
async fn a_command_is_a_notice_once_it_ends_with_zero() {
    let poll = |command: &str| {
        let mut source = CommandSource::new(command.to_owned());
        async move { source.poll().await }
    };
    assert_eq!(poll("exit 1").await, Ok(None));
    assert_eq!(poll("kill -9 $$").await, Ok(None));
    let notice = poll("echo 30s").await.unwrap().unwrap();
    assert_eq!(notice.time_left, Some(Duration::from_secs(30)));
    assert!(poll("/no/such/program").await.unwrap_err().contains("127"));
}

#[tokio::test]
async fn a_notice_is_passed_on_once_and_nobody_is_asked_where_nobody_is_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("leave");
    std::fs::write(&path, "9s").unwrap();
    let mut notices = watch(&[NoticeSetting::None, NoticeSetting::File(path)]);
    let notice = notices.recv().await.unwrap();
    assert_eq!((notice.source, notice.time_left), ("file", Some(Duration::from_secs(9))));
    assert_eq!(watch(&[NoticeSetting::None]).recv().await, None);
}

#[test]
fn settings_are_read_as_they_are_written() {
    for text in ["none", "auto", "aws", "file:/run/leave", "command:test -e /run/x:y"] {
        assert_eq!(text.parse::<NoticeSetting>().unwrap().to_string(), text);
    }
    for text in ["", "gcp", "file:", "command: ", "AWS"] {
        assert!(text.parse::<NoticeSetting>().unwrap_err().contains("file:PATH"), "{text:?}");
    }
}
