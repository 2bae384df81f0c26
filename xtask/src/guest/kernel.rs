//! Takes the uncompressed ELF kernel out of a bzImage.
//!
//! The layout is the kernel's Documentation/arch/x86/boot.rst: `setup_sects` (0x1f1) counts the 512-byte sectors of
//! real-mode code after the first; `payload_offset` (0x248) and `payload_length` (0x24c), since protocol 2.08, say
//! where in the protected-mode part the compressed kernel lies. Its last four bytes are the unpacked size.

use anyhow::{Context, Result, bail, ensure};
use std::io::Read;

const MAGIC: &[u8] = b"HdrS";
/// No kernel comes near; a damaged size must not make us fill the memory.
const LARGEST: u32 = 1 << 30;

/// Unpacks `image`; an image that is an ELF file already is returned as it is.
pub(super) fn extract(image: &[u8]) -> Result<Vec<u8>> {
    if image.starts_with(b"\x7fELF") {
        return Ok(image.to_vec());
    }
    let payload = payload(image)?;
    let (body, size) = payload.split_last_chunk::<4>().context("the kernel's payload is empty")?;
    let size = u32::from_le_bytes(*size);
    ensure!(size <= LARGEST, "the kernel claims to unpack to {size} bytes: the image is damaged");
    let mut kernel = Vec::with_capacity(usize::try_from(size)?);
    let limit = u64::from(size) + 1;
    match body {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            zstd::Decoder::new(body)?.single_frame().take(limit).read_to_end(&mut kernel)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            lzma_rust2::XzReader::new(body, false).take(limit).read_to_end(&mut kernel)
        }
        _ => bail!(
            "this kernel is packed neither with zstd nor with xz (it starts with {:02x?}); \
             choose another with --kernel-deb",
            &body[..body.len().min(4)]
        ),
    }
    .context("unpacking the kernel")?;
    ensure!(
        kernel.len() == usize::try_from(size)?,
        "the kernel unpacks to {} bytes, not {size}",
        kernel.len()
    );
    ensure!(kernel.starts_with(b"\x7fELF"), "what the image holds is no ELF kernel");
    Ok(kernel)
}

fn payload(image: &[u8]) -> Result<&[u8]> {
    let version = image.get(0x206..0x208).map(|b| u16::from_le_bytes([b[0], b[1]]));
    ensure!(image.get(0x202..0x206) == Some(MAGIC), "this is no bzImage: its header lacks HdrS");
    ensure!(
        version >= Some(0x0208),
        "this bzImage is older than boot protocol 2.08: it doesn't say where its kernel is"
    );
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the bzImage's header is cut short")?;
        Ok(usize::try_from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))?)
    };
    // Zero stands for four, for the sake of images from the last century.
    let sectors = match image[0x1f1] {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512 + word(0x248)?;
    let length = word(0x24c)?;
    start.checked_add(length).and_then(|end| image.get(start..end)).with_context(|| {
        format!("the bzImage has {} bytes, its kernel would end at {}", image.len(), start + length)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(packed: &[u8], size: u32) -> Vec<u8> {
        let mut image = vec![0_u8; 1024 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(MAGIC);
        image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        let length = u32::try_from(packed.len() + 4).unwrap();
        image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        image.extend_from_slice(packed);
        image.extend_from_slice(&size.to_le_bytes());
        image.extend_from_slice(b"what follows the payload");
        image
    }

    #[test]
    fn a_zstd_kernel_comes_out_whole() {
        let kernel = [b"\x7fELF".as_slice(), &[7; 100_000]].concat();
        let packed = zstd::encode_all(&kernel[..], 3).unwrap();
        assert_eq!(extract(&image(&packed, 100_004)).unwrap(), kernel);
    }

    #[test]
    fn a_lying_size_is_refused() {
        let kernel = [b"\x7fELF".as_slice(), &[7; 1000]].concat();
        let packed = zstd::encode_all(&kernel[..], 3).unwrap();
        assert!(extract(&image(&packed, 900)).unwrap_err().to_string().contains("not 900"));
        assert!(extract(&image(&packed, u32::MAX)).unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn a_cut_or_foreign_image_is_refused_by_name() {
        let kernel = [b"\x7fELF".as_slice(), &[7; 1000]].concat();
        let packed = zstd::encode_all(&kernel[..], 3).unwrap();
        let whole = image(&packed, 1004);
        assert!(extract(&whole[..1060]).unwrap_err().to_string().contains("would end at"));
        assert!(extract(b"MZ").unwrap_err().to_string().contains("HdrS"));
        assert!(extract(&image(b"\x1f\x8b\x08\0garbage", 4)).unwrap_err().to_string().contains("neither"));
    }
}
