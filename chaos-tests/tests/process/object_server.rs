//! A server that speaks the protocol of S3, on loopback.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpListener;

/// Serves until it is dropped.
pub(crate) struct ObjectServer {
    endpoint: String,
    _runtime: tokio::runtime::Runtime,
}

impl ObjectServer {
    /// Starts a server with one bucket, whose objects are files under `root`. It takes one request at a time: by itself it only looks
    /// before it writes, so that several creates at once could win.
    pub(crate) fn start(root: &Path, bucket: &str) -> anyhow::Result<Self> {
        std::fs::create_dir_all(root.join(bucket))?;
        let files =
            s3s_fs::FileSystem::new(root).ok().context("the server takes no such folder")?;
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let service = Arc::new((builder.build(), tokio::sync::Mutex::new(())));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = Arc::clone(&service);
                let one_by_one = service_fn(move |request| {
                    let service = Arc::clone(&service);
                    async move {
                        let _turn = service.1.lock().await;
                        Service::call(&service.0, request).await
                    }
                });
                tokio::spawn(
                    http1::Builder::new().serve_connection(TokioIo::new(socket), one_by_one),
                );
            }
        });
        Ok(Self { endpoint, _runtime: runtime })
    }

    /// What a process needs to reach it.
    pub(crate) fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", self.endpoint.clone()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
        ]
    }
}

const KEY: &str = "id";
const SECRET: &str = "secret";
