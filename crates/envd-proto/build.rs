//! Compiles the .proto files in Rust alone: protox reads them (no protoc to install), connectrpc-build writes
//! messages, service traits and clients.
use buffa_build::BytesRepr;
use connectrpc_build::CodeGenConfig;
use std::{env, error::Error, fs, path::PathBuf};

const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    let descriptors =
        PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join("descriptors.bin");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true).open_files(FILES)?;
    fs::write(&descriptors, compiler.encode_file_descriptor_set())?;
    for file in FILES {
        println!("cargo:rerun-if-changed=proto/{file}");
    }
    let mut messages = CodeGenConfig::default();
    // Output and input travel as shared slices of the buffers they were read into, never copied into a Vec.
    messages.bytes_fields.push((".".to_owned(), BytesRepr::Bytes));
    connectrpc_build::Config::new()
        .buffa_config(messages)
        .generate_json(true)
        .descriptor_set(&descriptors)
        .files(&FILES)
        .include_file("_connectrpc.rs")
        .gate_client_feature(true)
        .emit_rerun_directives(false)
        .compile()?;
    Ok(())
}
