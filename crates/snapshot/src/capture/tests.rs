use super::*;
use crate::pagemap::tests::{Mapping, own_pid};

#[derive(Default)]
struct Image {
    data: Vec<(u64, Vec<u8>)>,
    zero: Vec<(u64, u64)>,
}

impl Sink for Image {
    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.push((offset, bytes.to_vec()));
        Ok(())
    }
    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.zero.push((offset, len));
        Ok(())
    }
}

fn region(mapping: &Mapping, image_offset: u64) -> MemoryRegion {
    MemoryRegion { pid: own_pid(), host_addr: mapping.addr, image_offset, len: mapping.len as u64 }
}

#[test]
fn changed_pages_become_data_zeroes_or_nothing() {
    let mapping = Mapping::new(&vec![7; 32 * 4096]);
    mapping.write(PAGE, &[9; 2 * 4096]);
    mapping.write(3 * PAGE, &[0; 4096]);
    mapping.write(5 * PAGE, &[7; 4096]);
    let mut image = Image::default();
    let report = capture(&[region(&mapping, 0)], Some(&mapping.file), &mut image).unwrap();
    assert_eq!(report, Report { pages: 4, zero: 1, same: 1 });
    assert_eq!(image.data, [(PAGE, vec![9; 2 * 4096])]);
    assert_eq!(image.zero, [(3 * PAGE, PAGE)]);
}

#[test]
fn without_a_parent_every_changed_page_is_kept() {
    let mapping = Mapping::new(&vec![7; 4 * 4096]);
    mapping.write(2 * PAGE, &[7; 4096]);
    let mut image = Image::default();
    let report = capture(&[region(&mapping, 0)], None, &mut image).unwrap();
    assert_eq!(report, Report { pages: 1, zero: 0, same: 0 });
    assert_eq!(image.data, [(2 * PAGE, vec![7; 4096])]);
}

#[test]
fn regions_land_at_their_place_in_the_image_in_rising_order() {
    let low = Mapping::new(&vec![1; 4 * 4096]);
    let high = Mapping::new(&vec![1; 4 * 4096]);
    low.write(0, &[2]);
    high.write(PAGE, &[3]);
    let mut image = Image::default();
    // Given high first, as a monitor may list them.
    capture(&[region(&high, 1 << 20), region(&low, 0)], None, &mut image).unwrap();
    let places: Vec<_> = image.data.iter().map(|(offset, bytes)| (*offset, bytes[0])).collect();
    assert_eq!(places, [(0, 2), ((1 << 20) + PAGE, 3)]);
    assert_eq!(image.data[1].1[1], 1);
    assert_eq!(high.read_byte(PAGE), 3);
}

#[test]
fn parent_plus_capture_is_the_memory_whatever_was_written() {
    // More runs than one call takes and more bytes than one batch holds.
    let pages: u64 = 6000;
    let content: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE % 251) as u8).collect();
    let mapping = Mapping::new(&content);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..4000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let page = (seed >> 33) % pages;
        match (seed >> 20) % 4 {
            0 => mapping.write(page * PAGE, &[0; 4096]),
            1 => mapping.write(page * PAGE + seed % 4000, &[seed.to_le_bytes()[3]]),
            2 => mapping.write(page * PAGE, &[page.to_le_bytes()[0]; 4096]),
            _ => {
                mapping.read_byte(page * PAGE);
            }
        }
    }
    let mut image = Image::default();
    let report = capture(&[region(&mapping, 0)], Some(&mapping.file), &mut image).unwrap();
    assert!(report.pages > 1024 && report.zero > 0, "{report:?}");
    let mut rebuilt = content;
    for (offset, bytes) in image.data {
        let at = usize::try_from(offset).unwrap();
        rebuilt[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    for (offset, len) in image.zero {
        let at = usize::try_from(offset).unwrap();
        rebuilt[at..at + usize::try_from(len).unwrap()].fill(0);
    }
    for at in 0..mapping.len as u64 {
        assert_eq!(mapping.read_byte(at), rebuilt[usize::try_from(at).unwrap()], "byte {at}");
    }
}

#[test]
fn a_machine_that_is_gone_is_an_error() {
    let gone = MemoryRegion { pid: i32::MAX, host_addr: 0, image_offset: 0, len: PAGE };
    capture(&[gone], None, &mut Image::default()).unwrap_err();
}
